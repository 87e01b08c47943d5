// Q5_0 in planes: 32 columns a block, w = d * (nibble + 16 * bit - 16). Nibbles as in Q4_0; bit i of a block's word belongs to column i.
var<storage, read> weights_codes_plane: array<vec2<u32>>;   // (rows, columns / 16) two words of eight nibbles
var<storage, read> weights_bits_plane: array<u32>;          // (rows, columns / 32) the fifth bits
var<storage, read> weights_scales_plane: array<u32>;        // (rows, columns / 32) f16 d, two a word
fn weights_fives(nibbles: u32, bits: u32) -> vec4<f32> {
  let high = ((vec4<u32>(bits) >> vec4<u32>(0u, 1u, 2u, 3u)) & vec4<u32>(1u)) << vec4<u32>(4u);
  return vec4<f32>(unpack4xU8(nibbles & 0x0f0f0f0fu) | high);
}
fn weights_codes(row: u32, chunk: u32) -> mat4x4<f32> {
  let i = row * (params.columns / 16u) + chunk;
  let w = weights_codes_plane[i];
  let bits = weights_bits_plane[i / 2u] >> (16u * (i % 2u));
  return mat4x4<f32>(weights_fives(w.x, bits), weights_fives(w.x >> 4u, bits >> 4u), weights_fives(w.y, bits >> 8u), weights_fives(w.y >> 4u, bits >> 12u));
}
fn weights_affine(row: u32, chunk: u32) -> vec2<f32> {
  let block = (row * (params.columns / 16u) + chunk) / 2u;
  let d = unpack2x16float(weights_scales_plane[block / 2u] >> (16u * (block % 2u))).x;
  return vec2<f32>(d, -16.0 * d);
}
