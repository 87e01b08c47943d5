// Dot products of quantised weights with x as integers: affine.x * codes . x + affine.y * sum(x).        reference.linear, linear_int8
// 32 columns of x share a unit, and x / unit is rounded to DIGITS signed digits of 8 bits. With three, the unit is max |x| / (127 * 2^16): what f32
// keeps of the largest. With one, this is llama.cpp's Q8. Codes meet digits in dot4I8Packed, four products an instruction, where a code would take
// two to become a float and a third to be multiplied. x is rounded once a workgroup.
// Workgroup memory: DIGITS * COLUMNS + 3 * COLUMNS / 8.   Options: DIGITS (1 or 3), COLUMNS, a multiple of 32. Subgroups of at least 8.
const DIGIT_MOST = select(127.0, 8323072.0, DIGITS == 3u);
const DIGIT_LEAST = select(1e-35, 1e-30, DIGITS == 3u);          // what is smaller counts as zero: DIGIT_MOST / it would overflow
const DIGIT_CHUNKS = COLUMNS / 16u;
struct Input {
  //@ unroll d in 0..DIGITS
  digits$d: vec4<u32>,
  //@ end
  unit: f32,
  total: f32,
}
var<workgroup> input_digits: array<u32, DIGITS * COLUMNS / 4u>;  // (digit, word of a chunk, chunk), so that neighbouring lanes share no bank
var<workgroup> input_units: array<f32, COLUMNS / 32u>;
var<workgroup> input_totals: array<f32, COLUMNS / 16u>;          // the sum of 16 columns
fn input_put(i: u32, v: vec4<f32>, inside: bool) {
  // As integers, the absolute values of floats have the same order, and NaN is the highest.
  let size = bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu);
  var high = max(max(size.x, size.y), max(size.z, size.w));
  for (var d = 1u; d < 8u; d <<= 1u) { high = max(high, subgroupShuffleXor(high, d)); }
  let most = bitcast<f32>(high);
  var rest = vec4<i32>(round(v * select(0.0, DIGIT_MOST / most, most > DIGIT_LEAST)));
  var sum = rest.x + rest.y + rest.z + rest.w;
  for (var d = 1u; d < 4u; d <<= 1u) { sum += subgroupShuffleXor(sum, d); }
  if (inside) {
    for (var d = DIGITS; d > 0u; d--) {                          // the lowest digit first
      let digit = (rest << vec4<u32>(24u)) >> vec4<u32>(24u);
      input_digits[((d - 1u) * 4u + i % 4u) * DIGIT_CHUNKS + i / 4u] = pack4xI8(digit);
      rest = (rest - digit) >> vec4<u32>(8u);
    }
    let unit = most / DIGIT_MOST;
    if (i % 4u == 0u) { input_totals[i / 4u] = unit * f32(sum); }
    if (i % 8u == 0u) { input_units[i / 8u] = unit; }
  }
}
fn input_get(chunk: u32, inside: bool) -> Input {
  return Input(
    //@ unroll d in 0..DIGITS
    vec4<u32>(
      input_digits[$du * 4u * DIGIT_CHUNKS + chunk], input_digits[($du * 4u + 1u) * DIGIT_CHUNKS + chunk],
      input_digits[($du * 4u + 2u) * DIGIT_CHUNKS + chunk], input_digits[($du * 4u + 3u) * DIGIT_CHUNKS + chunk]),
    //@ end
    select(0.0, input_units[chunk / 2u], inside), select(0.0, input_totals[chunk], inside));
}
fn dot16(a: vec4<u32>, b: vec4<u32>) -> f32 {
  // An integer below the exponent of 2^23 is a float by its bits; GPUs convert at an eighth of the rate.
  let sum = dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y) + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w) + 0x4b400000;
  return bitcast<f32>(sum) - 12582912.0;
}
fn product(codes: Codes, affine: vec2<f32>, input: Input, sum: f32) -> f32 {
  let w = codes_ints(codes);
  var value = 0.0;
  //@ unroll d in 0..DIGITS
  value = fma(value, 256.0, dot16(w, input.digits$d));
  //@ end
  return fma(affine.x * input.unit, value, fma(affine.y, input.total, sum));
}
