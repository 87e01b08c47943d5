// Codes of 4 bits. A word holds eight columns: 0..3 in the low nibbles of its bytes, 4..7 in the high.
alias Codes = vec2<u32>;
const CODE_FLIP = 0u;
var<storage, read> weights_codes_plane: array<vec2<u32>>;   // (rows, columns / 16) two words of eight nibbles
fn codes_load(row: u32, chunk: u32) -> Codes { return weights_codes_plane[row * (params.columns / 16u) + chunk]; }
fn codes_ints(codes: Codes) -> vec4<u32> { return vec4<u32>(codes.x, codes.x >> 4u, codes.y, codes.y >> 4u) & vec4<u32>(0x0f0f0f0fu); }
