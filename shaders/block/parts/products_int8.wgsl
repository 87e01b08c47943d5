// Dot products of quantised weights with x rounded to int8, 32 columns to a scale: code = round(127 v / max |v|).        reference.linear_int8
// Two neighbouring lanes share a block of 32 columns. Codes of W and x meet in dot4I8Packed, four products an instruction.
struct Input { codes: vec4<u32>, unit: f32, total: f32 }
fn coded(v: vec4<f32>, factor: f32) -> u32 { return pack4xI8(vec4<i32>(round(v * factor))); }
fn dot16(a: vec4<u32>, b: vec4<u32>) -> f32 { return f32(dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y) + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w)); }
fn input_of(v: mat4x4<f32>) -> Input {
  let h = max(max(abs(v[0]), abs(v[1])), max(abs(v[2]), abs(v[3])));
  let mine = max(max(h.x, h.y), max(h.z, h.w));
  let high = max(mine, subgroupShuffleXor(mine, 1u));
  let factor = select(0.0, 127.0 / high, high > 1e-35);         // what is smaller counts as zero: 127 / high would overflow
  let codes = vec4<u32>(coded(v[0], factor), coded(v[1], factor), coded(v[2], factor), coded(v[3], factor));
  return Input(codes, high / 127.0, dot16(codes, vec4<u32>(0x01010101u)));
}
fn product(codes: Codes, affine: vec2<f32>, input: Input, sum: f32) -> f32 {
  return fma(input.unit, fma(affine.x, dot16(codes_ints(codes), input.codes), affine.y * input.total), sum);
}
