// Rows of f16 whose length and offsets are multiples of 4: `at` is the row's offset in elements, i the number of the vec4.
var<storage, read> $name: array<vec2<u32>>;      // (rows, channels) f16, four in two words
fn $name_load(at: u32, i: u32) -> vec4<f32> {
  let w = $name[at / 4u + i];
  return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y));
}
