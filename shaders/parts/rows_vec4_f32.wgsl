// Rows of f32 whose length and offsets are multiples of 4: `at` is the row's offset in elements, i the number of the vec4.
var<storage, read> $name: array<vec4<f32>>;      // (rows, channels) f32
fn $name_load(at: u32, i: u32) -> vec4<f32> { return $name[at / 4u + i]; }
