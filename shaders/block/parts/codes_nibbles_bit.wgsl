// Codes of 5 bits: nibbles as in codes_nibbles, and bit i of a word for column i of 32.
alias Codes = vec3<u32>;                                    // nibbles, and sixteen fifth bits
const CODE_BITS = 5u;
const CODE_FLIP = 0u;
var<storage, read> weights_codes_plane: array<vec2<u32>>;   // (rows, columns / 16) two words of eight nibbles
var<storage, read> weights_bits_plane: array<u32>;          // (rows, columns / 32) the fifth bits
fn codes_load(row: u32, chunk: u32) -> Codes {
  let i = row * (params.columns / 16u) + chunk;
  return vec3<u32>(weights_codes_plane[i], weights_bits_plane[i / 2u] >> (16u * (i % 2u)));
}
fn codes_spread(bits: u32) -> u32 { return (((bits & 15u) * 0x00204081u) & 0x01010101u) << 4u; }   // four bits to bit 4 of four bytes
fn codes_ints(codes: Codes) -> vec4<u32> {
  let bits = codes.z;
  return (vec4<u32>(codes.x, codes.x >> 4u, codes.y, codes.y >> 4u) & vec4<u32>(0x0f0f0f0fu))
    | vec4<u32>(codes_spread(bits), codes_spread(bits >> 4u), codes_spread(bits >> 8u), codes_spread(bits >> 12u));
}
