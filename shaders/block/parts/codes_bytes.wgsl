// Codes of 8 bits, signed.
var<storage, read> weights_codes_plane: array<vec4<u32>>;   // (rows, columns / 16) sixteen int8
fn weights_ints(row: u32, chunk: u32) -> vec4<u32> { return weights_codes_plane[row * (params.columns / 16u) + chunk]; }
