// Rows of f16 by 16 bytes: their length and offsets are multiples of 8. `at` is the row's offset in elements, i the number of eight halves; beyond the
// row 0.
var<storage, read> $name: array<vec4<u32>>;      // (rows, $width) f16, eight in four words
fn $name_eight(at: u32, i: u32) -> vec4<u32> {
  if (8u * i >= $width) { return vec4<u32>(); }
  return $name[at / 8u + i];
}
