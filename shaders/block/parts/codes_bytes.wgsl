// Codes of 8 bits, signed.
alias Codes = vec4<u32>;
const CODE_FLIP = 0x80808080u;                              // makes them unsigned, 128 more
var<storage, read> weights_codes_plane: array<vec4<u32>>;   // (rows, columns / 16) sixteen int8
fn codes_load(row: u32, chunk: u32) -> Codes { return weights_codes_plane[row * (params.columns / 16u) + chunk]; }
fn codes_ints(codes: Codes) -> vec4<u32> { return codes; }
