// Dot products of quantised weights in f32: affine.x * codes . x + affine.y * sum(x).
// A code becomes a float by its bits: below the exponent of 2^CODE_BITS they are the number 2^CODE_BITS + code, two operations instead of a
// conversion, which GPUs do at a quarter of the rate. What is too much is taken off with sum(x), once for 16 columns. Codes of 8 bits are converted:
// the more bits, the more of the sum's precision it costs.
const CODE_MASK = ((1u << CODE_BITS) - 1u) << (23u - CODE_BITS);
const CODE_ONE = (127u + CODE_BITS) << 23u;
const CODE_EXTRA = select(f32(1u << CODE_BITS), 0.0, CODE_BITS == 8u);
const CODE_UP = 7u - min(CODE_BITS, 7u);
struct Input { v: mat4x4<f32>, start: vec4<f32>, total: f32 }
fn input_of(v: mat4x4<f32>) -> Input {
  let total = dot(v[0] + v[1] + v[2] + v[3], vec4<f32>(1.0));
  return Input(v, vec4<f32>(-CODE_EXTRA * total, 0.0, 0.0, 0.0), total);
}
fn codes_raised(w: u32) -> vec4<f32> {
  if (CODE_BITS == 8u) { return vec4<f32>(unpack4xI8(w)); }
  let bits = vec4<u32>(w << (23u - CODE_BITS), w << (15u - CODE_BITS), w << CODE_UP, w >> (1u + CODE_BITS));
  return bitcast<vec4<f32>>((bits & vec4<u32>(CODE_MASK)) | vec4<u32>(CODE_ONE));
}
fn product(codes: Codes, affine: vec2<f32>, input: Input, sum: f32) -> f32 {
  let w = codes_ints(codes);
  let products = fma(codes_raised(w.x), input.v[0], fma(codes_raised(w.y), input.v[1],
    fma(codes_raised(w.z), input.v[2], fma(codes_raised(w.w), input.v[3], input.start))));
  return fma(affine.x, dot(products, vec4<f32>(1.0)), fma(affine.y, input.total, sum));
}
