// Dot products of weights that are floats.   Workgroup memory: 4 * COLUMNS.   Options: COLUMNS.
struct Input { v: mat4x4<f32> }
var<workgroup> input: array<vec4<f32>, COLUMNS / 4u>;
fn input_slot(i: u32) -> u32 { return i ^ ((i / 8u) & 3u); }     // so that lanes reading neighbouring chunks share no bank
fn input_put(i: u32, v: vec4<f32>, inside: bool) { if (inside) { input[input_slot(i)] = v; } }
fn input_get(chunk: u32, inside: bool) -> Input {
  let own = select(0.0, 1.0, inside);
  return Input(own * mat4x4<f32>(
    input[input_slot(chunk * 4u)], input[input_slot(chunk * 4u + 1u)], input[input_slot(chunk * 4u + 2u)], input[input_slot(chunk * 4u + 3u)]));
}
fn product(codes: Codes, affine: vec2<f32>, input: Input, sum: f32) -> f32 {
  let c = codes_floats(codes);
  return sum + dot(fma(c[0], input.v[0], fma(c[1], input.v[1], fma(c[2], input.v[2], c[3] * input.v[3]))), vec4<f32>(1.0));
}
