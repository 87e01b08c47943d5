// A mask of words: 0 hides the key. Columns before mask_first are visible.   Parts: problem.
var<storage, read> mask: array<u32>;             // (batch or 1, heads or 1, queries or 1, columns) u32 or i32
fn mask_at(b: u32, h: u32, i: u32, j: u32) -> f32 {
  return select(LOWEST, 0.0, (mask[mask_index(b, h, i, j)] != 0u) | (j < params.mask_first));
}
