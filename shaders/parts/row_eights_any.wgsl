// Eight halves of a row: `at` is the row's offset in elements, i their number; beyond the row 0.   With: rows_* and row_halves_* of the same name.
fn $name_eight(at: u32, i: u32) -> vec4<u32> {
  var v = vec4<u32>();
  if (8u * i < $width) { v = vec4<u32>($name_halves(at, 2u * i), 0u, 0u); }
  if (8u * i + 4u < $width) { v = vec4<u32>(v.xy, $name_halves(at, 2u * i + 1u)); }
  return v;
}
