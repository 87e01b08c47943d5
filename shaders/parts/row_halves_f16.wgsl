// Rows of f16 as they are: `at` is the row's offset in elements, i the number of four halves.   With: rows_vec4_f16 of the same name.
fn $name_halves(at: u32, i: u32) -> vec2<u32> { return $name[at / 4u + i]; }
