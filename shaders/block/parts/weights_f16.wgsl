// f16, two columns a word; needs no f16 arithmetic.
var<storage, read> weights_codes_plane: array<vec4<u32>>;   // (rows, columns padded to 16) f16
fn weights_codes(row: u32, chunk: u32) -> mat4x4<f32> {
  let i = (row * ((params.columns + 15u) / 16u) + chunk) * 2u;
  let a = weights_codes_plane[i];
  let b = weights_codes_plane[i + 1u];
  return mat4x4<f32>(
    vec4<f32>(unpack2x16float(a.x), unpack2x16float(a.y)), vec4<f32>(unpack2x16float(a.z), unpack2x16float(a.w)),
    vec4<f32>(unpack2x16float(b.x), unpack2x16float(b.y)), vec4<f32>(unpack2x16float(b.z), unpack2x16float(b.w)));
}
fn weights_affine(row: u32, chunk: u32) -> vec2<f32> { return vec2<f32>(1.0, 0.0); }
