// Codes of 5 bits: nibbles as in codes_nibbles, and for 32 columns a word with the fifth bits: byte b of word column group g (four columns each) at
// bit 8b + g.
alias Codes = vec3<u32>;                                    // nibbles, and the fifth bits: of the first four columns at bit 4 of each byte
const CODE_FLIP = 0u;
var<storage, read> weights_codes_plane: array<vec2<u32>>;   // (rows, columns / 16) two words of eight nibbles
var<storage, read> weights_bits_plane: array<u32>;          // (rows, columns / 32) the fifth bits
fn codes_load(row: u32, chunk: u32) -> Codes {
  let i = row * (params.columns / 16u) + chunk;
  return vec3<u32>(weights_codes_plane[i], weights_bits_plane[i / 2u] << (4u - 4u * (i % 2u)));
}
fn codes_ints(codes: Codes) -> vec4<u32> {
  let bits = codes.z;
  return (vec4<u32>(codes.x, codes.x >> 4u, codes.y, codes.y >> 4u) & vec4<u32>(0x0f0f0f0fu))
    | (vec4<u32>(bits, bits >> 1u, bits >> 2u, bits >> 3u) & vec4<u32>(0x10101010u));
}
