// Weights that are floats as f16, columns of each four as 0, 2, 1, 3.
fn halves_four(v: vec4<f32>) -> vec2<u32> { return vec2<u32>(pack2x16float(v.xz), pack2x16float(v.yw)); }
fn codes_halves(codes: Codes, affine: vec2<f32>) -> array<vec4<u32>, 2> {
  let c = codes_floats(codes);
  return array<vec4<u32>, 2>(vec4<u32>(halves_four(c[0]), halves_four(c[1])), vec4<u32>(halves_four(c[2]), halves_four(c[3])));
}
