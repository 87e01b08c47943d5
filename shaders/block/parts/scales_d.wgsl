// One f16 scale for 32 columns: w = d * (code - ZERO).   Options: ZERO.
alias Scales = u32;
var<storage, read> weights_scales_plane: array<u32>;        // (rows, columns / 32) f16 d, two a word
fn scales_load(row: u32, chunk: u32) -> Scales { return weights_scales_plane[(row * (params.columns / 16u) + chunk) / 4u]; }
fn scales_affine(scales: Scales, row: u32, chunk: u32) -> vec2<f32> {
  let d = unpack2x16float(scales >> (8u * ((row * (params.columns / 16u) + chunk) & 2u))).x;
  return vec2<f32>(d, -f32(ZERO) * d);
}
