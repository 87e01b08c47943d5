// A replayed step: its tokens are the last of the sequence.   Parts: step.
fn query_count() -> u32 { return step.count; }
fn key_count(b: u32) -> u32 { return step.position + step.count; }
