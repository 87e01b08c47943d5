// Any rows for split.wgsl: a unit is one vec4 (WIDE = 1).   With: rows_* of the same name.
fn $name_unit(at: u32, i: u32) -> vec4<f32> { return $name_load(at, i); }
fn $name_vec4_0(unit: vec4<f32>) -> vec4<f32> { return unit; }
