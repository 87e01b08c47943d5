// The lse is not wanted.
fn lse_store(b: u32, h: u32, i: u32, highest: f32, sum: f32) {}
