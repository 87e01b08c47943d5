// Scores in log2 units: softcap, then ALiBi, then mask; LOWEST where the mask hides the key.        reference.attention
// Options: SOFTCAP; parts: alibi_*, mask_*.
fn query_scale() -> f32 { return params.scale; }
fn adjust(score: f32, b: u32, h: u32, i: u32, j: u32) -> f32 {
  var x = score;
  if (SOFTCAP) { x = params.softcap * tanh(saturated(x / params.softcap, 15.0)); }   // tanh of more overflows on some GPUs
  x -= alibi(b, h, i, j);
  let m = mask_at(b, h, i, j);
  return select(saturated(x + m, 2.3e38) * LOG2E, LOWEST, m <= LOWEST);                  // stays above LOWEST, and finite
}
