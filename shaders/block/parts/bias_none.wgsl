// No bias.
fn bias_at(row: u32) -> f32 { return 0.0; }
