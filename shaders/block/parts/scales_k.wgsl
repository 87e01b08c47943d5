// Q4_K, Q5_K: 256 columns share f16 d and dmin, and each 32 of them have 6-bit factors: w = d * sc * code - dmin * mn.
alias Scales = vec3<u32>;                                   // d and dmin, four sc, four mn
var<storage, read> weights_scales_plane: array<u32>;        // (rows, columns / 256) of five words: d and dmin, eight bytes sc, eight bytes mn
fn scales_load(row: u32, chunk: u32) -> Scales {
  let i = row * (params.columns / 16u) + chunk;
  let block = i / 16u * 5u;
  let quarter = i / 8u % 2u;
  return vec3<u32>(weights_scales_plane[block], weights_scales_plane[block + 1u + quarter], weights_scales_plane[block + 3u + quarter]);
}
fn scales_affine(scales: Scales, row: u32, chunk: u32) -> vec2<f32> {
  let d = unpack2x16float(scales.x);
  let shift = 4u * (chunk & 6u);                              // a row is a whole number of blocks
  return vec2<f32>(d.x * f32((scales.y >> shift) & 255u), -d.y * f32((scales.z >> shift) & 255u));
}
