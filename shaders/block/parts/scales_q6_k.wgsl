// Q6_K: 256 columns share an f16 d, and each 16 of them have a signed byte: w = d * sc * (code - 32).
alias Scales = vec2<u32>;                                   // two d, four sc
var<storage, read> weights_scales_plane: array<u32>;        // (rows, columns / 64) of four int8 sc
var<storage, read> weights_blocks_plane: array<u32>;        // (rows, columns / 256) f16 d, two a word
fn scales_load(row: u32, chunk: u32) -> Scales {
  let i = row * (params.columns / 16u) + chunk;
  return vec2<u32>(weights_blocks_plane[i / 32u], weights_scales_plane[i / 4u]);
}
fn scales_affine(scales: Scales, row: u32, chunk: u32) -> vec2<f32> {
  let d = unpack2x16float(scales.x >> ((row * (params.columns / 16u) + chunk) & 16u)).x;
  let scale = d * f32(i32(scales.y << (24u - 8u * (chunk % 4u))) >> 24u);
  return vec2<f32>(scale, -32.0 * scale);
}
