// Q6_K: 256 columns share an f16 d, and each 16 of them have a signed byte: w = d * sc * (code - 32).
var<storage, read> weights_scales_plane: array<u32>;        // (rows, columns / 64) of four int8 sc
var<storage, read> weights_blocks_plane: array<u32>;        // (rows, columns / 256) f16 d, two a word
fn weights_affine(row: u32, chunk: u32) -> vec2<f32> {
  let i = row * (params.columns / 16u) + chunk;
  let block = i / 16u;
  let d = unpack2x16float(weights_blocks_plane[block / 2u] >> (16u * (block % 2u))).x;
  let scale = d * f32(i32(weights_scales_plane[i / 4u] << (24u - 8u * (i % 4u))) >> 24u);
  return vec2<f32>(scale, -32.0 * scale);
}
