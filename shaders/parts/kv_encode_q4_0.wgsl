// GGUF's Q4_0: scale = v / -8 for the v farthest from 0, the first of equals; code = v / scale + 8.5 rounded down, at most 15.        reference.kv_stored
const KV_BITS = 4u;
const KV_LIMIT = 524032.0;                       // 8 * 65504: what an f16 scale reaches
fn kv_high(high: f32, v: vec4<f32>) -> f32 {
  var far = high;
  far = select(far, v.x, abs(v.x) > abs(far));
  far = select(far, v.y, abs(v.y) > abs(far));
  far = select(far, v.z, abs(v.z) > abs(far));
  return select(far, v.w, abs(v.w) > abs(far));
}
fn kv_scale(high: f32) -> f32 { return high / -8.0; }
fn kv_codes(v: vec4<f32>, inverse: f32) -> u32 { return pack4xI8(vec4<i32>(min(v * inverse + 8.5, vec4<f32>(15.0)))); }
