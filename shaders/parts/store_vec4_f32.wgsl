// Rows of f32 to write, whose length and offsets are multiples of 4.
var<storage, read_write> $name: array<vec4<f32>>;   // (rows, channels) f32
fn $name_store(at: u32, i: u32, v: vec4<f32>) { $name[at / 4u + i] = v; }
