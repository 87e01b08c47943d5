// What the block formats of a KV cache have in common: 32 values share a scale, an f16.
// The scale is rounded here, because WGSL leaves open which way pack2x16float rounds; to the nearest, to even between two. Too large ones saturate.
fn kv_half(d: f32) -> u32 {
  let bits = bitcast<u32>(d);
  let size = min(bits & 0x7fffffffu, 0x477fe000u);                              // 65504
  let normal = (size - 0x37fff001u + ((size >> 13u) & 1u)) >> 13u;              // the exponent's bias, and half a unit less one if even
  let small = bitcast<u32>(bitcast<f32>(size) + 0.5) - 0x3f000000u;             // below 2^-14: units of 2^-24, as in f32 from 0.5 on
  return ((bits >> 16u) & 0x8000u) | select(normal, small, size < 0x38800000u);
}
fn kv_inverse(d: f32) -> f32 { return select(0.0, 1.0 / d, abs(d) > 1.0e-37); }
