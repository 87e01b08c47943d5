// A mask that is added; columns before mask_first are visible.   Parts: problem.
var<storage, read> mask: array<f32>;             // (batch or 1, heads or 1, queries or 1, columns) f32
fn mask_at(b: u32, h: u32, i: u32, j: u32) -> f32 {
  return select(mask[mask_index(b, h, i, j)], 0.0, j < params.mask_first);
}
