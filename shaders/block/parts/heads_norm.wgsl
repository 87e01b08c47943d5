// QK-norm: RMSNorm over each head of Q and K, before the rotation. A workgroup computes whole heads, ROWS rows of them in each of HEAD_SLOTS slots.
// Workgroup memory: 4 * HEAD_SLOTS.        reference.rms_norm
const HEAD_PARTS = HEAD_DIM / ROWS;
var<storage, read> head_gamma: array<f32>;       // (2, HEAD_DIM) f32 of Q and of K, in the order of W's rows
var<workgroup> head_squares: array<f32, HEAD_SLOTS>;
fn head_gain(row: u32, slot: u32, leads: bool, results: array<f32, ROWS>) -> f32 {
  var squares = 0.0;
  //@ unroll r in 0..ROWS
  squares = fma(results[$r], results[$r], squares);
  //@ end
  workgroupBarrier();
  if (leads) { head_squares[slot] = squares; }
  workgroupBarrier();
  var sum = 0.0;
  for (var t = 0u; t < HEAD_PARTS; t++) { sum += head_squares[slot / HEAD_PARTS * HEAD_PARTS + t]; }
  return select(1.0, inverseSqrt(sum / f32(HEAD_DIM) + params.eps), (params.first_row + row) / HEAD_DIM < HEADS + KV_HEADS);
}
fn head_weight(row: u32) -> f32 {
  let head = (params.first_row + row) / HEAD_DIM;
  if (head >= HEADS + KV_HEADS) { return 1.0; }
  return head_gamma[select(0u, HEAD_DIM, head >= HEADS) + (params.first_row + row) % HEAD_DIM];
}
