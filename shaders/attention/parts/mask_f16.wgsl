// A mask that is added; f16's lowest value hides a key. Columns before mask_first are visible. Strides of 0 broadcast.
var<storage, read> mask: array<u32>;             // (batch or 1, heads or 1, queries or 1, columns) f16, two a word
fn mask_at(b: u32, h: u32, i: u32, j: u32) -> f32 {
  if (j < params.mask_first) { return 0.0; }
  let at = b * params.mask_batch + h * params.mask_head + i * params.mask_row + (j - params.mask_first) * params.mask_column;
  let m = unpack2x16float(mask[at / 2u] >> (16u * (at % 2u))).x;
  return select(LOWEST, m, m > -65504.0);
}
