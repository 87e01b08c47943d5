// Floats of 16 bits, two columns a word; the part that says which kind has `weights_pair`.
var<storage, read> weights_codes_plane: array<vec4<u32>>;   // (rows, columns padded to 16) 16 bits each
struct Codes { a: vec4<u32>, b: vec4<u32> }
fn codes_load(row: u32, chunk: u32) -> Codes {
  let i = (row * ((params.columns + 15u) / 16u) + chunk) * 2u;
  return Codes(weights_codes_plane[i], weights_codes_plane[i + 1u]);
}
fn codes_floats(codes: Codes) -> mat4x4<f32> {
  let a = codes.a;
  let b = codes.b;
  return mat4x4<f32>(
    vec4<f32>(weights_pair(a.x), weights_pair(a.y)), vec4<f32>(weights_pair(a.z), weights_pair(a.w)),
    vec4<f32>(weights_pair(b.x), weights_pair(b.y)), vec4<f32>(weights_pair(b.z), weights_pair(b.w)));
}
