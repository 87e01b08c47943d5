// Rows rounded to f16: `at` is the row's offset in elements, i the number of four halves.   With: rows_* of the same name.
fn $name_halves(at: u32, i: u32) -> vec2<u32> {
  let v = clamp($name_load(at, i), vec4<f32>(-65504.0), vec4<f32>(65504.0));
  return vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw));
}
