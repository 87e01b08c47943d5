// Scores or probabilities out of scratch memory into an array without padding: y = x in natural units, -inf for keys out of sight;
// or, if PROBABILITIES, y = p as softmax.wgsl has left it.                                                       attention/scores.py
// Each invocation copies one of them.   Workgroup memory: none.
// Options: HEAD_DIM, VALUE_DIM, PROBABILITIES, WORKGROUP; parts: problem, lengths_*, matrices.

var<storage, read> scores: array<f32>;           // (planes, rows, columns) f32
var<storage, read_write> stage: array<u32>;      // (batch, heads, queries, keys) f32, written by their bits: infinities are not portable

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let number = (group.x + group.y * groups.x) * WORKGROUP + index;   // linear: plane, query, key
  let j = number % params.keys;
  let i = number / params.keys % params.queries;
  let z = number / params.keys / params.queries;
  if (z >= matrices.planes) { return; }
  let b = batch_of(z);
  var bits = 0xff800000u;
  if (PROBABILITIES || (j >= first_key(b, i) && j < end_key(b, i))) {
    let x = scores[(z * matrices.rows + i) * matrices.columns + j];
    if (PROBABILITIES || !(x <= LOWEST)) { bits = bitcast<u32>(select(x / LOG2E, x, PROBABILITIES)); }
  }
  stage[(matrices.first * params.queries) * params.keys + number] = bits;
}
