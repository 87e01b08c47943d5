// Q4_K, Q5_K: 256 columns share f16 d and dmin, and each 32 of them have 6-bit factors: w = d * sc * code - dmin * mn.
var<storage, read> weights_scales_plane: array<u32>;        // (rows, columns / 256) of five words: d and dmin, eight bytes sc, eight bytes mn
fn weights_affine(row: u32, chunk: u32) -> vec2<f32> {
  let i = row * (params.columns / 16u) + chunk;
  let block = i / 16u * 5u;
  let sub = i % 16u / 2u;
  let d = unpack2x16float(weights_scales_plane[block]);
  let sc = (weights_scales_plane[block + 1u + sub / 4u] >> (8u * (sub % 4u))) & 255u;
  let mn = (weights_scales_plane[block + 3u + sub / 4u] >> (8u * (sub % 4u))) & 255u;
  return vec2<f32>(d.x * f32(sc), -d.y * f32(mn));
}
