// Quantised weights as f16, scale * code + offset rounded once. A byte under the exponent of 1024 is the half 1024 + code; bytes 0 and 2, and
// bytes 1 and 3 of a word become pairs, so that columns of each four come as 0, 2, 1, 3.
const HALVES_EXTRA = f16(1024u + (CODE_FLIP & 255u));
fn halves_word(w: u32, scale: vec4<f16>, offset: vec4<f16>) -> vec2<u32> {
  let raised = bitcast<vec4<f16>>((vec2<u32>(w, w >> 8u) & vec2<u32>(0x00ff00ffu)) | vec2<u32>(0x64006400u));
  return bitcast<vec2<u32>>(fma(raised - vec4<f16>(HALVES_EXTRA), scale, offset));
}
fn codes_halves(codes: Codes, affine: vec2<f32>) -> array<vec4<u32>, 2> {
  let w = codes_ints(codes) ^ vec4<u32>(CODE_FLIP);
  let scale = vec4<f16>(f16(affine.x));
  let offset = vec4<f16>(f16(affine.y));
  return array<vec4<u32>, 2>(
    vec4<u32>(halves_word(w.x, scale, offset), halves_word(w.y, scale, offset)),
    vec4<u32>(halves_word(w.z, scale, offset), halves_word(w.w, scale, offset)));
}
