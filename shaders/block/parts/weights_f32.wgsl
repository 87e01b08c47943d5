// f32.
var<storage, read> weights_codes_plane: array<vec4<f32>>;   // (rows, columns padded to 16) f32
alias Codes = mat4x4<f32>;
fn codes_load(row: u32, chunk: u32) -> Codes {
  let i = (row * ((params.columns + 15u) / 16u) + chunk) * 4u;
  return mat4x4<f32>(weights_codes_plane[i], weights_codes_plane[i + 1u], weights_codes_plane[i + 2u], weights_codes_plane[i + 3u]);
}
fn codes_floats(codes: Codes) -> mat4x4<f32> { return codes; }
