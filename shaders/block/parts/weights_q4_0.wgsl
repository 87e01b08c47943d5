// Q4_0 in planes: 32 columns a block, w = d * (nibble - 8). A word holds eight columns: 0..3 in the low nibbles of its bytes, 4..7 in the high.
var<storage, read> weights_codes_plane: array<vec2<u32>>;   // (rows, columns / 16) two words of eight nibbles
var<storage, read> weights_scales_plane: array<u32>;        // (rows, columns / 32) f16 d, two a word
fn weights_nibbles(word: u32) -> vec4<f32> { return vec4<f32>(unpack4xU8(word & 0x0f0f0f0fu)); }
fn weights_codes(row: u32, chunk: u32) -> mat4x4<f32> {
  let w = weights_codes_plane[row * (params.columns / 16u) + chunk];
  return mat4x4<f32>(weights_nibbles(w.x), weights_nibbles(w.x >> 4u), weights_nibbles(w.y), weights_nibbles(w.y >> 4u));
}
fn weights_affine(row: u32, chunk: u32) -> vec2<f32> {
  let block = (row * (params.columns / 16u) + chunk) / 2u;
  let d = unpack2x16float(weights_scales_plane[block / 2u] >> (16u * (block % 2u))).x;
  return vec2<f32>(d, -8.0 * d);
}
