// Attention of many queries on a CPU: o = softmax(adjust(scale * q . K)) . V                                 reference.attention
// One invocation computes ROWS rows, KEYS keys at a time, all in registers: a CPU pays for loads per lane and for barriers, so each
// loaded vec4 of a key serves ROWS rows, and each accumulator is touched once for KEYS keys. Rows are numbered as in flash_rows.
// Online softmax (Milakov and Gimelshein 2018). Scores are in log2 units.
// Workgroup memory: none.
// Options: HEAD_DIM, VALUE_DIM, ROWS, KEYS, VALUE_SLOTS = VALUE_WIDTH, WORKGROUP, LANES = 1, SUBGROUP (not used);
// parts: problem, lengths_*, rows_* as query, keys and values, adjust_*, flash_rows, store_* as out, finish, sink_*, lse_*.

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let b = group.z;
  let row = ((params.first_group + group.x) * WORKGROUP + index) * ROWS;
  if (row >= flash_count()) { return; }
  let k_at = b * params.k_batch + group.y * params.k_head;
  let v_at = b * params.v_batch + group.y * params.v_head;
  //@ unroll r in 0..ROWS
  let row$r = flash_row(b, group.y, row + $ru);
  let q_at$r = flash_query(b, row$r);
  var max$r = LOWEST;
  var sum$r = 0.0;
  //@ unroll s in 0..VALUE_SLOTS
  var o$r_$s = vec4<f32>();
  //@ end
  //@ end
  let seen = flash_keys(b, row, ROWS);
  let end = seen.y;
  for (var base = seen.x; base < end; base += KEYS) {
    //@ unroll k in 0..KEYS
    let j$k = base + $ku;
    let k_at$k = k_at + min(j$k, end - 1u) * params.k_row;
    let v_at$k = v_at + min(j$k, end - 1u) * params.v_row;
    //@ unroll r in 0..ROWS
    var dot$r_$k = 0.0;
    //@ end
    //@ end
    for (var c = 0u; c < WIDTH; c++) {
      //@ unroll k in 0..KEYS
      let k$k = keys_load(k_at$k, c);
      //@ end
      //@ unroll r in 0..ROWS
      {
        let q = query_load(q_at$r, c);
        //@ unroll k in 0..KEYS
        dot$r_$k = fma(q.x, k$k.x, fma(q.y, k$k.y, fma(q.z, k$k.z, fma(q.w, k$k.w, dot$r_$k))));
        //@ end
      }
      //@ end
    }
    //@ unroll r in 0..ROWS
    var high$r = max$r;
    //@ unroll k in 0..KEYS
    var p$r_$k = flash_score(dot$r_$k * query_scale(), b, row$r, j$k);
    high$r = max(high$r, p$r_$k);
    //@ end
    let keep$r = exp2(max$r - high$r);
    max$r = high$r;
    sum$r *= keep$r;
    //@ unroll k in 0..KEYS
    p$r_$k = select(exp2(p$r_$k - high$r), 0.0, p$r_$k <= LOWEST);
    sum$r += p$r_$k;
    //@ end
    //@ end
    //@ unroll s in 0..VALUE_SLOTS
    {
      //@ unroll k in 0..KEYS
      let v$k = values_load(v_at$k, $su);
      //@ end
      //@ unroll r in 0..ROWS
      {
        var o = o$r_$s * keep$r;
        //@ unroll k in 0..KEYS
        o = fma(vec4<f32>(p$r_$k), v$k, o);
        //@ end
        o$r_$s = o;
      }
      //@ end
    }
    //@ end
  }
  //@ unroll r in 0..ROWS
  if (row + $ru < flash_count()) {
    let factor = finish(b, row$r.h, row$r.i, max$r, sum$r, true);
    let at = flash_output(b, row$r);
    //@ unroll s in 0..VALUE_SLOTS
    out_store(at, $su, select(o$r_$s * factor, vec4<f32>(), factor <= 0.0));
    //@ end
  }
  //@ end
}
