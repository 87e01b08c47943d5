// The packed codes of a quantised format as floats.
fn codes_floats(codes: Codes) -> mat4x4<f32> {
  let w = codes_ints(codes);
  return mat4x4<f32>(vec4<f32>(unpack4xI8(w.x)), vec4<f32>(unpack4xI8(w.y)), vec4<f32>(unpack4xI8(w.z)), vec4<f32>(unpack4xI8(w.w)));
}
