// Rows fetched now and decoded later: fetched decoded.   With: rows_* of the same name.
alias $name_stored = vec4<f32>;
fn $name_fetch(at: u32, i: u32) -> vec4<f32> { return $name_load(at, i); }
fn $name_decode(stored: vec4<f32>, i: u32) -> vec4<f32> { return stored; }
