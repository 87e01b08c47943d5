// A mask that is added; f16's lowest value hides a key. Columns before mask_first are visible.   Parts: problem.
var<storage, read> mask: array<u32>;             // (batch or 1, heads or 1, queries or 1, columns) f16, two a word
fn mask_at(b: u32, h: u32, i: u32, j: u32) -> f32 {
  let at = mask_index(b, h, i, j);
  let m = unpack2x16float(mask[at / 2u] >> (16u * (at % 2u))).x;
  return select(select(m, LOWEST, m <= -65504.0), 0.0, j < params.mask_first);
}
