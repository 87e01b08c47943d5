// Scores in memory: x = adjust(scale * q . K), in log2 units; softmax.wgsl and qkv.wgsl follow.                  reference.attention
// Each invocation computes ROWS queries x 4 keys of one head. One workgroup: ROWS queries, 4 * WORKGROUP keys.
// Keys that no query of the block sees are left out; which keys a query sees is for softmax.wgsl to know.
// Workgroup memory: none.
// Options: HEAD_DIM, VALUE_DIM, ROWS, WORKGROUP; parts: problem, lengths_*, matrices, rows_* as query and keys, adjust_*.

var<storage, read_write> scores: array<vec4<f32>>;   // (planes, rows, columns) f32

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let number = group.x + group.y * groups.x;     // linear: plane, block of queries
  let blocks = (params.queries + ROWS - 1u) / ROWS;
  let z = number / blocks;
  let row = number % blocks * ROWS;
  if (z >= matrices.planes || row >= query_count()) { return; }
  let b = batch_of(z);
  let h = head_of(z);
  let last = min(row + ROWS, query_count()) - 1u;
  let begin = first_key(b, row);
  let end = end_key(b, last);
  let j = (group.z * WORKGROUP + index) * 4u;
  if (j >= end || j + 4u <= begin) { return; }
  let q_at = b * params.q_batch + h * params.q_head;
  let k_at = b * params.k_batch + h / (params.heads / params.kv_heads) * params.k_head;
  //@ unroll k in 0..4
  let j$k = clamp(j + $ku, begin, end - 1u);
  let k_at$k = k_at + j$k * params.k_row;
  //@ end
  //@ unroll r in 0..ROWS
  let i$r = min(row + $ru, last);
  let q_at$r = q_at + i$r * params.q_row;
  //@ unroll k in 0..4
  var dot$r_$k = vec4<f32>();
  //@ end
  //@ end
  for (var c = 0u; c < WIDTH; c++) {
    //@ unroll k in 0..4
    let k$k = keys_load(k_at$k, c);
    //@ end
    //@ unroll r in 0..ROWS
    {
      let q = query_load(q_at$r, c);
      //@ unroll k in 0..4
      dot$r_$k = fma(q, k$k, dot$r_$k);
      //@ end
    }
    //@ end
  }
  //@ unroll r in 0..ROWS
  if (row + $ru <= last) {
    var x = vec4<f32>();
    //@ unroll k in 0..4
    x[$k] = adjust(dot(dot$r_$k, vec4<f32>(query_scale())), b, h, i$r, j$k);
    //@ end
    scores[((z * matrices.rows + row + $ru) * matrices.columns + j) / 4u] = x;
  }
  //@ end
}
