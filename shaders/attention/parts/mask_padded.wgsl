// The mask as rearrange_mask.wgsl has left it.   Parts: matrices.
var<storage, read> padded_mask: array<f32>;      // (mask planes, rows, columns) f32
fn mask_at(b: u32, h: u32, i: u32, j: u32) -> f32 {
  return padded_mask[(mask_plane(b * params.heads + h - matrices.first) * matrices.rows + i) * matrices.columns + j];
}
