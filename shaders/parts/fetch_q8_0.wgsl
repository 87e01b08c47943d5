// Rows fetched now and decoded later, so that nothing waits for memory before it must: codes and scales.   With: rows_q8_0 of the same name.
// Holes: name, scales (the word where the scales begin).
alias $name_stored = vec2<u32>;
fn $name_fetch(at: u32, i: u32) -> vec2<u32> {
  return vec2<u32>($name[at / 4u + i], $name[$scales + at / $name_STRIDE * (($name_STRIDE + 32u) / 64u) + i / 16u]);
}
fn $name_decode(stored: vec2<u32>, i: u32) -> vec4<f32> {
  return vec4<f32>(unpack4xI8(stored.x)) * unpack2x16float(stored.y >> ((i * 2u) & 16u)).x;
}
