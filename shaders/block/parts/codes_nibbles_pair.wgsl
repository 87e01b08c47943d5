// Codes of 6 bits: nibbles as in codes_nibbles, and for 16 columns a word with the upper two bits: byte b of word column group g (four columns
// each) at bits 8b + 2g.
alias Codes = vec3<u32>;                                    // nibbles, and the upper bits
const CODE_FLIP = 0u;
var<storage, read> weights_codes_plane: array<vec2<u32>>;   // (rows, columns / 16) two words of eight nibbles
var<storage, read> weights_bits_plane: array<u32>;          // (rows, columns / 16) the upper bits
fn codes_load(row: u32, chunk: u32) -> Codes {
  let i = row * (params.columns / 16u) + chunk;
  return vec3<u32>(weights_codes_plane[i], weights_bits_plane[i]);
}
fn codes_ints(codes: Codes) -> vec4<u32> {
  let bits = codes.z;
  return (vec4<u32>(codes.x, codes.x >> 4u, codes.y, codes.y >> 4u) & vec4<u32>(0x0f0f0f0fu))
    | (vec4<u32>(bits << 4u, bits << 2u, bits, bits >> 2u) & vec4<u32>(0x30303030u));
}
