// Outputs from probabilities in memory: o = p . V, after qk_div_mask.wgsl and softmax.wgsl.                      reference.attention
// Each invocation computes ROWS queries x 4 channels of one head, over the keys that any of these queries sees.
// Workgroup memory: none.
// Options: HEAD_DIM, VALUE_DIM, ROWS, WORKGROUP; parts: problem, lengths_*, matrices, rows_* as values, store_* as out.

var<storage, read> scores: array<vec4<f32>>;     // (planes, rows, columns) f32, by now probabilities

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let number = (group.x + group.y * groups.x) * WORKGROUP + index;   // linear: plane, block of queries, vec4 of channels
  let blocks = (params.queries + ROWS - 1u) / ROWS;
  let c = number % VALUE_WIDTH;
  let row = number / VALUE_WIDTH % blocks * ROWS;
  let z = number / VALUE_WIDTH / blocks;
  if (z >= matrices.planes || row >= query_count()) { return; }
  let b = batch_of(z);
  let h = head_of(z);
  let last = min(row + ROWS, query_count()) - 1u;
  let begin = first_key(b, row);
  let end = end_key(b, last);
  let v_at = b * params.v_batch + h / (params.heads / params.kv_heads) * params.v_head;
  //@ unroll r in 0..ROWS
  let p_at$r = (z * matrices.rows + min(row + $ru, last)) * matrices.columns;
  var o$r = vec4<f32>();
  //@ end
  for (var j = begin / 4u * 4u; j < end; j += 4u) {
    //@ unroll r in 0..ROWS
    let p$r = scores[(p_at$r + j) / 4u];
    //@ end
    //@ unroll k in 0..4
    {
      let v = values_load(v_at + clamp(j + $ku, begin, end - 1u) * params.v_row, c);   // a key out of sight may hold NaN
      //@ unroll r in 0..ROWS
      o$r = fma(vec4<f32>(p$r[$k]), v, o$r);
      //@ end
    }
    //@ end
  }
  let o_at = b * params.o_batch + h * params.o_head;
  //@ unroll r in 0..ROWS
  if (row + $ru <= last) { out_store(o_at + (row + $ru) * params.o_row, c, o$r); }
  //@ end
}
