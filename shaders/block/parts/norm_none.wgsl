// No norm in front of the projection.   Options: COLUMNS (0; for norm_shared).
fn norm_prepare(at: u32, index: u32) {}
fn norm_input(at: u32, i: u32) -> vec4<f32> { return x[at + i]; }
fn norm_gain(chunk: u32) -> f32 { return 1.0; }
fn norm_square(v: vec4<f32>) -> f32 { return 0.0; }
fn norm_apply4(v: vec4<f32>, c: u32) -> vec4<f32> { return v; }
fn norm_squares(v: mat4x4<f32>) -> f32 { return 0.0; }
fn norm_apply(v: mat4x4<f32>, gain: f32) -> mat4x4<f32> { return v; }
fn norm_scale(squares: f32) -> f32 { return 1.0; }
