// RMSNorm in front of the projection of one token, prepared once a workgroup: x * gamma in workgroup memory.        reference.rms_norm
// For a CPU, where each of a few invocations would otherwise do it again for its own rows.
// Workgroup memory: 16 * NORM_WIDTH + 4 * WORKGROUP.   Options: COLUMNS.
const NORM_WIDTH = (COLUMNS + 15u) / 16u * 4u;
var<storage, read> gamma: array<vec4<f32>>;      // (columns padded to 16) f32
var<workgroup> norm_x: array<vec4<f32>, NORM_WIDTH>;
var<workgroup> norm_parts: array<f32, WORKGROUP>;
fn norm_prepare(at: u32, index: u32) {
  var squares = 0.0;
  for (var i = index; i < NORM_WIDTH; i += WORKGROUP) {
    let v = x[at + i];
    squares += dot(v, v);
    norm_x[i] = v * gamma[i];
  }
  norm_parts[index] = squares;
  workgroupBarrier();
}
fn norm_input(at: u32, i: u32) -> vec4<f32> { return norm_x[i]; }
fn norm_gain(chunk: u32) -> f32 { return 1.0; }
fn norm_squares(v: mat4x4<f32>) -> f32 { return 0.0; }
fn norm_apply(v: mat4x4<f32>, gain: f32) -> mat4x4<f32> { return v; }
fn norm_scale(squares: f32) -> f32 {
  var total = 0.0;
  for (var i = 0u; i < WORKGROUP; i++) { total += norm_parts[i]; }
  return inverseSqrt(total / f32(params.columns) + params.eps);
}
