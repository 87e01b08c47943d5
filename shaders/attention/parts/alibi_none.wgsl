// No penalty for distance.
fn alibi(b: u32, h: u32, i: u32, j: u32) -> f32 { return 0.0; }
