// An f16 scale and offset for 32 columns: w = d * code + m.
alias Scales = u32;
var<storage, read> weights_scales_plane: array<u32>;        // (rows, columns / 32) f16 d, m
fn scales_load(row: u32, chunk: u32) -> Scales { return weights_scales_plane[(row * (params.columns / 16u) + chunk) / 2u]; }
fn scales_affine(scales: Scales, row: u32, chunk: u32) -> vec2<f32> { return unpack2x16float(scales); }
