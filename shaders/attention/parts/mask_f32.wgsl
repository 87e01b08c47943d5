// A mask that is added; columns before mask_first are visible. Strides of 0 broadcast.
var<storage, read> mask: array<f32>;             // (batch or 1, heads or 1, queries or 1, columns) f32
fn mask_at(b: u32, h: u32, i: u32, j: u32) -> f32 {
  if (j < params.mask_first) { return 0.0; }
  return mask[b * params.mask_batch + h * params.mask_head + i * params.mask_row + (j - params.mask_first) * params.mask_column];
}
