// Rows of $width f16, anywhere: `at` is the row's offset in elements, i the number of the vec4; what is beyond the row reads as 0.
var<storage, read> $name: array<u32>;            // (rows, $width) f16, two a word
fn $name_at(i: u32) -> f32 { return unpack2x16float($name[i / 2u] >> (16u * (i % 2u))).x; }
fn $name_load(at: u32, i: u32) -> vec4<f32> {
  let c = i * 4u;
  var v = vec4<f32>();
  if (c < $width) { v.x = $name_at(at + c); }
  if (c + 1u < $width) { v.y = $name_at(at + c + 1u); }
  if (c + 2u < $width) { v.z = $name_at(at + c + 2u); }
  if (c + 3u < $width) { v.w = $name_at(at + c + 3u); }
  return v;
}
