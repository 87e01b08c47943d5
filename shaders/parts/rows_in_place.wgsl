// Rows that are read from the buffer $target, vec4s of f32 to which the kernel also writes.
fn $name_load(at: u32, i: u32) -> vec4<f32> { return $target[at / 4u + i]; }
