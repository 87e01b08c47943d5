// QK-norm: RMSNorm over each head of Q and K, before the rotation. A workgroup computes whole heads: TEAMS * ROWS is a multiple of HEAD_DIM.
// Workgroup memory: 4 * TEAMS.        reference.rms_norm
const TEAMS = WORKGROUP / LANES;
const HEAD_TEAMS = HEAD_DIM / ROWS;
var<storage, read> head_gamma: array<f32>;       // (2, HEAD_DIM) f32 of Q and of K, in the order of W's rows
var<workgroup> head_squares: array<f32, TEAMS>;
fn head_gain(row: u32, lane: u32, results: array<f32, ROWS>) -> f32 {
  var squares = 0.0;
  //@ unroll r in 0..ROWS
  squares = fma(results[$r], results[$r], squares);
  //@ end
  let team = team_index / LANES;
  workgroupBarrier();
  if (lane == 0u) { head_squares[team] = squares; }
  workgroupBarrier();
  var sum = 0.0;
  for (var t = 0u; t < HEAD_TEAMS; t++) { sum += head_squares[team / HEAD_TEAMS * HEAD_TEAMS + t]; }
  return select(1.0, inverseSqrt(sum / f32(HEAD_DIM) + params.eps), (params.first_row + row) / HEAD_DIM < HEADS + KV_HEADS);
}
fn head_weight(row: u32) -> f32 {
  let head = (params.first_row + row) / HEAD_DIM;
  if (head >= HEADS + KV_HEADS) { return 1.0; }
  return head_gamma[select(0u, HEAD_DIM, head >= HEADS) + (params.first_row + row) % HEAD_DIM];
}
