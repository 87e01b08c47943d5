// Q8_0 in planes: 32 columns a block, w = d * int8.
var<storage, read> weights_codes_plane: array<vec4<u32>>;   // (rows, columns / 16) sixteen int8
var<storage, read> weights_scales_plane: array<u32>;        // (rows, columns / 32) f16 d, two a word
fn weights_codes(row: u32, chunk: u32) -> mat4x4<f32> {
  let w = weights_codes_plane[row * (params.columns / 16u) + chunk];
  return mat4x4<f32>(vec4<f32>(unpack4xI8(w.x)), vec4<f32>(unpack4xI8(w.y)), vec4<f32>(unpack4xI8(w.z)), vec4<f32>(unpack4xI8(w.w)));
}
fn weights_affine(row: u32, chunk: u32) -> vec2<f32> {
  let block = (row * (params.columns / 16u) + chunk) / 2u;
  return vec2<f32>(unpack2x16float(weights_scales_plane[block / 2u] >> (16u * (block % 2u))).x, 0.0);
}
