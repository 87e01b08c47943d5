// f32.
var<storage, read> weights_codes_plane: array<vec4<f32>>;   // (rows, columns padded to 16) f32
fn weights_codes(row: u32, chunk: u32) -> mat4x4<f32> {
  let i = (row * ((params.columns + 15u) / 16u) + chunk) * 4u;
  return mat4x4<f32>(weights_codes_plane[i], weights_codes_plane[i + 1u], weights_codes_plane[i + 2u], weights_codes_plane[i + 3u]);
}
fn weights_affine(row: u32, chunk: u32) -> vec2<f32> { return vec2<f32>(1.0, 0.0); }
