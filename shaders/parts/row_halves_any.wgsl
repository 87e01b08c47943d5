// Rows rounded to f16: `at` is the row's offset in elements, i the number of four halves.   With: rows_* of the same name; parts: flash_units.
fn $name_halves(at: u32, i: u32) -> vec2<u32> { return halves($name_load(at, i)); }
