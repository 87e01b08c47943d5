// No subgroups (SUBGROUP is 1): everything meets in workgroup memory.
fn sharers_add(value: f32) -> f32 { return value; }
fn neighbours_add(value: f32) -> f32 { return value; }
