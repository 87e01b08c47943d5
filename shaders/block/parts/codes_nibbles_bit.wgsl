// Codes of 5 bits: nibbles as in codes_nibbles, and bit i of a word for column i of 32.
var<storage, read> weights_codes_plane: array<vec2<u32>>;   // (rows, columns / 16) two words of eight nibbles
var<storage, read> weights_bits_plane: array<u32>;          // (rows, columns / 32) the fifth bits
fn weights_spread(bits: u32) -> u32 { return ((bits & 1u) << 4u) | ((bits & 2u) << 11u) | ((bits & 4u) << 18u) | ((bits & 8u) << 25u); }   // four bits to bit 4 of four bytes
fn weights_ints(row: u32, chunk: u32) -> vec4<u32> {
  let i = row * (params.columns / 16u) + chunk;
  let w = weights_codes_plane[i];
  let bits = weights_bits_plane[i / 2u] >> (16u * (i % 2u));
  return (vec4<u32>(w.x, w.x >> 4u, w.y, w.y >> 4u) & vec4<u32>(0x0f0f0f0fu))
    | vec4<u32>(weights_spread(bits), weights_spread(bits >> 4u), weights_spread(bits >> 8u), weights_spread(bits >> 12u));
}
