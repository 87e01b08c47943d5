// RMSNorm in front of the projection: x * gamma / sqrt(mean(x^2) + eps).        reference.rms_norm
// Options: COLUMNS (0; for norm_shared).
var<storage, read> gamma: array<vec4<f32>>;      // (columns padded to 16) f32
fn norm_prepare(at: u32, index: u32) {}
fn norm_input(at: u32, i: u32) -> vec4<f32> { return x[at + i]; }
fn norm_gain(chunk: u32) -> mat4x4<f32> {
  return mat4x4<f32>(gamma[chunk * 4u], gamma[chunk * 4u + 1u], gamma[chunk * 4u + 2u], gamma[chunk * 4u + 3u]);
}
fn norm_square(v: vec4<f32>) -> f32 { return dot(v, v); }
fn norm_apply4(v: vec4<f32>, c: u32) -> vec4<f32> { return v * gamma[c]; }
fn norm_squares(v: mat4x4<f32>) -> f32 { return norm_square(v[0]) + norm_square(v[1]) + norm_square(v[2]) + norm_square(v[3]); }
fn norm_apply(v: mat4x4<f32>, gain: mat4x4<f32>) -> mat4x4<f32> {
  return mat4x4<f32>(v[0] * gain[0], v[1] * gain[1], v[2] * gain[2], v[3] * gain[3]);
}
fn norm_scale(squares: f32) -> f32 { return inverseSqrt(team_add(squares) / f32(params.columns) + params.eps); }
