// Rows of $width f32, anywhere: `at` is the row's offset in elements, i the number of the vec4; what is beyond the row reads as 0.
var<storage, read> $name: array<f32>;            // (rows, $width) f32
fn $name_load(at: u32, i: u32) -> vec4<f32> {
  let c = i * 4u;
  var v = vec4<f32>();
  if (c < $width) { v.x = $name[at + c]; }
  if (c + 1u < $width) { v.y = $name[at + c + 1u]; }
  if (c + 2u < $width) { v.z = $name[at + c + 2u]; }
  if (c + 3u < $width) { v.w = $name[at + c + 3u]; }
  return v;
}
