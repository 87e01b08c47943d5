// Dot products of weights that are floats.
struct Input { v: mat4x4<f32> }
fn input_of(v: mat4x4<f32>) -> Input { return Input(v); }
fn product(codes: Codes, affine: vec2<f32>, input: Input, sum: f32) -> f32 {
  let c = codes_floats(codes);
  return sum + dot(fma(c[0], input.v[0], fma(c[1], input.v[1], fma(c[2], input.v[2], c[3] * input.v[3]))), vec4<f32>(1.0));
}
