// bf16, two columns a word: the upper half of an f32.
var<storage, read> weights_codes_plane: array<vec4<u32>>;   // (rows, columns padded to 16) bf16
fn weights_pair(word: u32) -> vec2<f32> { return bitcast<vec2<f32>>(vec2<u32>(word << 16u, word & 0xffff0000u)); }
fn weights_codes(row: u32, chunk: u32) -> mat4x4<f32> {
  let i = (row * ((params.columns + 15u) / 16u) + chunk) * 2u;
  let a = weights_codes_plane[i];
  let b = weights_codes_plane[i + 1u];
  return mat4x4<f32>(
    vec4<f32>(weights_pair(a.x), weights_pair(a.y)), vec4<f32>(weights_pair(a.z), weights_pair(a.w)),
    vec4<f32>(weights_pair(b.x), weights_pair(b.y)), vec4<f32>(weights_pair(b.z), weights_pair(b.w)));
}
fn weights_affine(row: u32, chunk: u32) -> vec2<f32> { return vec2<f32>(1.0, 0.0); }
