// Rows of $width f32 to write, anywhere.
var<storage, read_write> $name: array<f32>;      // (rows, $width) f32
fn $name_store(at: u32, i: u32, v: vec4<f32>) {
  let c = i * 4u;
  if (c < $width) { $name[at + c] = v.x; }
  if (c + 1u < $width) { $name[at + c + 1u] = v.y; }
  if (c + 2u < $width) { $name[at + c + 2u] = v.z; }
  if (c + 3u < $width) { $name[at + c + 3u] = v.w; }
}
