// Join the splits of split.wgsl: o = sum_s 2^(m_s - m) o_s / sum_s 2^(m_s - m) l_s.        reference.merge_state
// One workgroup a head of a query; each invocation takes four channels at a time.
// Workgroup memory: none.   Options: HEAD_DIM, VALUE_DIM, WORKGROUP; parts: problem, lengths_*, store_* as out, finish, sink_*, lse_*.

var<storage, read> partial_out: array<vec4<f32>>;   // (batch, queries, heads, splits, VALUE_WIDTH) f32
var<storage, read> partial_stat: array<vec2<f32>>;  // (batch, queries, heads, splits) of (max in log2 units, sum) f32

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let number = group.x + group.y * groups.x;     // linear: batch, query, head
  let h = number % params.heads;
  let i = number / params.heads % params.queries;
  let b = number / params.heads / params.queries;
  if (b >= params.batch || i >= query_count()) { return; }
  let at = number * params.splits;
  var highest = LOWEST;
  for (var s = 0u; s < params.splits; s++) { highest = max(highest, partial_stat[at + s].x); }
  for (var c = index; c < VALUE_WIDTH; c += WORKGROUP) {
    var sum = 0.0;
    var v = vec4<f32>();
    for (var s = 0u; s < params.splits; s++) {
      let stat = partial_stat[at + s];
      let weight = select(0.0, exp2(stat.x - highest), stat.y > 0.0);
      sum = fma(weight, stat.y, sum);
      v = fma(vec4<f32>(weight), partial_out[(at + s) * VALUE_WIDTH + c], v);
    }
    let factor = finish(b, h, i, highest, sum, c == 0u);
    out_store(b * params.o_batch + h * params.o_head + i * params.o_row, c, select(vec4<f32>(), v * factor, factor > 0.0));
  }
}
