// Codes of 6 bits: nibbles as in codes_nibbles, and for 16 columns a word with the upper two bits: byte b of word column group g (four columns
// each) at bits 8b + 2g.
var<storage, read> weights_codes_plane: array<vec2<u32>>;   // (rows, columns / 16) two words of eight nibbles
var<storage, read> weights_bits_plane: array<u32>;          // (rows, columns / 16) the upper bits
fn weights_ints(row: u32, chunk: u32) -> vec4<u32> {
  let i = row * (params.columns / 16u) + chunk;
  let w = weights_codes_plane[i];
  let bits = weights_bits_plane[i];
  return (vec4<u32>(w.x, w.x >> 4u, w.y, w.y >> 4u) & vec4<u32>(0x0f0f0f0fu))
    | (vec4<u32>(bits << 4u, bits << 2u, bits, bits >> 2u) & vec4<u32>(0x30303030u));
}
