// x is in memory as it is.
fn source_ahead(index: u32) {}
fn source_load(i: u32, keeps: bool) -> vec4<f32> { return x[i]; }
