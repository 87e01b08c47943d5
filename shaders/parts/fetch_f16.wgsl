// Rows fetched now and decoded later, so that nothing waits for memory before it must.   With: rows_vec4_f16 of the same name.
alias $name_stored = vec2<u32>;
fn $name_fetch(at: u32, i: u32) -> vec2<u32> { return $name[at / 4u + i]; }
fn $name_decode(stored: vec2<u32>, i: u32) -> vec4<f32> { return vec4<f32>(unpack2x16float(stored.x), unpack2x16float(stored.y)); }
