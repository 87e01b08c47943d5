// A mask of bytes: 0 hides the key. Columns before mask_first are visible. Strides of 0 broadcast.
var<storage, read> mask: array<u32>;             // (batch or 1, heads or 1, queries or 1, columns) u8, four a word
fn mask_at(b: u32, h: u32, i: u32, j: u32) -> f32 {
  if (j < params.mask_first) { return 0.0; }
  let at = b * params.mask_batch + h * params.mask_head + i * params.mask_row + (j - params.mask_first) * params.mask_column;
  return select(LOWEST, 0.0, ((mask[at / 4u] >> (8u * (at % 4u))) & 255u) != 0u);
}
