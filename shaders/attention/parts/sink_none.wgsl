// No attention sink.
fn sink_of(h: u32) -> f32 { return LOWEST; }
