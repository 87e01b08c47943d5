// Weights that are f16 already, columns of each four as 0, 2, 1, 3.
fn halves_four(v: vec2<u32>) -> vec2<u32> { return vec2<u32>((v.x & 0xffffu) | (v.y << 16u), (v.x >> 16u) | (v.y & 0xffff0000u)); }
fn codes_halves(codes: Codes, affine: vec2<f32>) -> array<vec4<u32>, 2> {
  return array<vec4<u32>, 2>(vec4<u32>(halves_four(codes.a.xy), halves_four(codes.a.zw)), vec4<u32>(halves_four(codes.b.xy), halves_four(codes.b.zw)));
}
