// Join the splits of split.wgsl: o = sum_s 2^(m_s - m) o_s / sum_s 2^(m_s - m) l_s.        reference.merge_state
// One workgroup a head of a query: PARTS invocations a column of four channels take EACH splits each, all loaded at once, and meet in workgroup memory.
// Workgroup memory: PARTS * (16 * COLUMNS + 8).   Options: HEAD_DIM, VALUE_DIM, ONE_QUERY, COLUMNS, PARTS, EACH = ceil(splits / PARTS);
// parts: problem, lengths_*, store_* as out, finish, sink_*, lse_*.

var<storage, read> partial_out: array<vec4<f32>>;   // (batch, queries, heads, splits, VALUE_WIDTH) f32
var<storage, read> partial_stat: array<vec2<f32>>;  // (batch, queries, heads, splits) of (max in log2 units, sum) f32

const WORKGROUP = COLUMNS * PARTS;

var<workgroup> part_out: array<vec4<f32>, PARTS * COLUMNS>;
var<workgroup> part_stat: array<vec2<f32>, PARTS>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let number = group.x + group.y * groups.x;     // linear: batch, query, head
  var h = number;
  var i = 0u;
  var b = 0u;
  if (!ONE_QUERY) {
    let row = number / params.heads;
    h -= row * params.heads;
    b = row / params.queries;
    i = row - b * params.queries;
  }
  if (b >= params.batch || i >= query_count() || h >= params.heads) { return; }
  let at = number * params.splits;
  let part = index / COLUMNS;
  for (var column = 0u; column < VALUE_WIDTH; column += COLUMNS) {
    let c = column + index % COLUMNS;
    var highest = LOWEST;
    //@ unroll e in 0..EACH
    let s$e = at + min(part + $eu * PARTS, params.splits - 1u);
    let stat$e = select(vec2<f32>(LOWEST, 0.0), partial_stat[s$e], part + $eu * PARTS < params.splits);
    let v$e = partial_out[s$e * VALUE_WIDTH + min(c, VALUE_WIDTH - 1u)];
    highest = max(highest, stat$e.x);
    //@ end
    var sum = 0.0;
    var v = vec4<f32>();
    //@ unroll e in 0..EACH
    {
      let weight = select(exp2(stat$e.x - highest), 0.0, stat$e.y <= 0.0);
      sum = fma(weight, stat$e.y, sum);
      v = fma(vec4<f32>(weight), v$e, v);
    }
    //@ end
    if (PARTS > 1u) {
      if (column > 0u) { workgroupBarrier(); }
      part_out[index] = v;
      if (index % COLUMNS == 0u) { part_stat[part] = vec2<f32>(highest, sum); }
      workgroupBarrier();
      highest = LOWEST;
      sum = 0.0;
      v = vec4<f32>();
      //@ unroll e in 0..PARTS
      let joined$e = part_stat[$eu];
      highest = max(highest, joined$e.x);
      //@ end
      //@ unroll e in 0..PARTS
      {
        let weight = exp2(joined$e.x - highest);
        sum = fma(weight, joined$e.y, sum);
        v = fma(vec4<f32>(weight), part_out[$eu * COLUMNS + index % COLUMNS], v);
      }
      //@ end
    }
    if (part == 0u && c < VALUE_WIDTH) {
      let factor = finish(b, h, i, highest, sum, c == 0u);
      out_store(b * params.o_batch + h * params.o_head + i * params.o_row, c, select(v * factor, vec4<f32>(), factor <= 0.0));
    }
  }
}
