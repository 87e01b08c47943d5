// Rows of scores become probabilities, in place: p = softmax(x) over the keys that the query sees, 0 in all other columns.   reference.attention
// One workgroup, which is one team, a row. The scores are in log2 units; those of keys out of sight are not read.
// Workgroup memory: that of the team part.
// Options: HEAD_DIM, VALUE_DIM, LANES, WORKGROUP = LANES, SUBGROUP; parts: problem, lengths_*, matrices, team_*, finish, sink_*, lse_*.

var<storage, read_write> scores: array<vec4<f32>>;   // (planes, rows, columns) f32

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  team_index = index;
  let number = group.x + group.y * groups.x;     // linear: plane, query
  let z = number / params.queries;
  let i = number % params.queries;
  if (z >= matrices.planes || i >= query_count()) { return; }
  let b = batch_of(z);
  let h = head_of(z);
  let first = first_key(b, i);
  let end = end_key(b, i);
  let at = (z * matrices.rows + i) * matrices.columns / 4u;
  let begin4 = first / 4u;
  let end4 = (end + 3u) / 4u;
  var high = vec4<f32>(LOWEST);
  for (var c = begin4 + index; c < end4; c += LANES) { high = max(high, seen(scores[at + c], c * 4u, first, end)); }
  let highest = team_max(max(max(high.x, high.y), max(high.z, high.w)));
  var sums = vec4<f32>();
  for (var c = begin4 + index; c < end4; c += LANES) { sums += weights(seen(scores[at + c], c * 4u, first, end), highest); }
  let sum = team_add(dot(sums, vec4<f32>(1.0)));
  let factor = finish(b, h, i, highest, sum, index == 0u);
  for (var c = index; c < matrices.columns / 4u; c += LANES) {
    var p = vec4<f32>();
    if (c >= begin4 && c < end4) { p = weights(seen(scores[at + c], c * 4u, first, end), highest) * factor; }
    scores[at + c] = p;
  }
}

// Scores of keys j .. j + 3, LOWEST for those that are not seen.
fn seen(x: vec4<f32>, j: u32, first: u32, end: u32) -> vec4<f32> {
  let key = vec4<u32>(j) + vec4<u32>(0u, 1u, 2u, 3u);
  return select(vec4<f32>(LOWEST), x, (key >= vec4<u32>(first)) & (key < vec4<u32>(end)));
}

fn weights(x: vec4<f32>, highest: f32) -> vec4<f32> { return select(exp2(x - highest), vec4<f32>(), x <= vec4<f32>(LOWEST)); }
