// Rows fetched now and decoded later, so that nothing waits for memory before it must: codes and scales.   With: rows_q4_0 of the same name.
// Holes: name, scales (the word where the scales begin).
alias $name_stored = vec2<u32>;
fn $name_fetch(at: u32, i: u32) -> vec2<u32> {
  return vec2<u32>($name[at / 8u + i / 2u], $name[$scales + at / $name_STRIDE * (($name_STRIDE + 32u) / 64u) + i / 16u]);
}
fn $name_decode(stored: vec2<u32>, i: u32) -> vec4<f32> {
  let codes = (stored.x >> ((i * 4u) & 4u)) & 0x0f0f0f0fu;
  return (vec4<f32>(unpack4xI8(codes)) - 8.0) * unpack2x16float(stored.y >> ((i * 2u) & 16u)).x;
}
