// All sequences have the same number of keys.
fn query_count() -> u32 { return params.queries; }
fn key_count(b: u32) -> u32 { return params.keys; }
