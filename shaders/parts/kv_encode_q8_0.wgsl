// GGUF's Q8_0: scale = max |v| / 127, code = v / scale rounded to the nearest, away from zero between two.        reference.kv_stored
const KV_BITS = 8u;
const KV_LIMIT = 8319008.0;                      // 127 * 65504: what an f16 scale reaches
fn kv_high(high: f32, v: vec4<f32>) -> f32 {
  let a = abs(v);
  return max(high, max(max(a.x, a.y), max(a.z, a.w)));
}
fn kv_scale(high: f32) -> f32 { return high / 127.0; }
fn kv_codes(v: vec4<f32>, inverse: f32) -> u32 {
  let y = v * inverse;
  let down = floor(abs(y));
  return pack4xI8(vec4<i32>(sign(y) * (down + floor(2.0 * (abs(y) - down)))));
}
