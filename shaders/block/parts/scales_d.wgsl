// One f16 scale for 32 columns: w = d * (code - ZERO).   Options: ZERO.
var<storage, read> weights_scales_plane: array<u32>;        // (rows, columns / 32) f16 d, two a word
fn weights_affine(row: u32, chunk: u32) -> vec2<f32> {
  let block = (row * (params.columns / 16u) + chunk) / 2u;
  let d = unpack2x16float(weights_scales_plane[block / 2u] >> (16u * (block % 2u))).x;
  return vec2<f32>(d, -f32(ZERO) * d);
}
