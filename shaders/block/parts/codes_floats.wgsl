// The packed codes of a quantised format as floats.
fn weights_codes(row: u32, chunk: u32) -> mat4x4<f32> {
  let w = weights_ints(row, chunk);
  return mat4x4<f32>(vec4<f32>(unpack4xI8(w.x)), vec4<f32>(unpack4xI8(w.y)), vec4<f32>(unpack4xI8(w.z)), vec4<f32>(unpack4xI8(w.w)));
}
