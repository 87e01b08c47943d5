// Rows of f16 for split.wgsl, 16 bytes at a time: their length and offsets are multiples of 8. `at` is the row's offset in elements, i the number of
// the unit of WIDE = 2 vec4s.
var<storage, read> $name: array<vec4<u32>>;      // (rows, $width) f16, eight in four words
fn $name_unit(at: u32, i: u32) -> vec4<u32> { return $name[at / 8u + i]; }
fn $name_vec4_0(unit: vec4<u32>) -> vec4<f32> { return vec4<f32>(unpack2x16float(unit.x), unpack2x16float(unit.y)); }
fn $name_vec4_1(unit: vec4<u32>) -> vec4<f32> { return vec4<f32>(unpack2x16float(unit.z), unpack2x16float(unit.w)); }
