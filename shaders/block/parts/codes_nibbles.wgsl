// Codes of 4 bits. A word holds eight columns: 0..3 in the low nibbles of its bytes, 4..7 in the high.
var<storage, read> weights_codes_plane: array<vec2<u32>>;   // (rows, columns / 16) two words of eight nibbles
fn weights_ints(row: u32, chunk: u32) -> vec4<u32> {
  let w = weights_codes_plane[row * (params.columns / 16u) + chunk];
  return vec4<u32>(w.x, w.x >> 4u, w.y, w.y >> 4u) & vec4<u32>(0x0f0f0f0fu);
}
