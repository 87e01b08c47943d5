// Attention of many queries, no scores in memory: o = softmax(adjust(scale * q . K)) . V                     reference.attention
// A team of LANES invocations computes ROWS rows, as flash_rows numbers them.
// It walks over the keys that any of its rows sees, STEP = LANES * KEYS at a time: each lane scores KEYS of them for all rows,
// the probabilities go through workgroup memory, and each lane then adds up VALUE_SLOTS vec4s of the outputs.
// FlashAttention (Dao et al. 2022), online softmax (Milakov and Gimelshein 2018). Scores are in log2 units.
// Workgroup memory: 4 * TEAMS * ROWS * STEP, and that of the team part.
// Options: HEAD_DIM, VALUE_DIM, LANES, ROWS, KEYS, VALUE_SLOTS = ceil(VALUE_WIDTH / LANES), WORKGROUP;
// parts: problem, lengths_*, rows_* as query, keys and values, adjust_*, flash_rows, team_*, store_* as out, finish, sink_*, lse_*.

const TEAMS = WORKGROUP / LANES;
const STEP = LANES * KEYS;

var<workgroup> probability: array<f32, TEAMS * ROWS * STEP>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  team_index = index;
  let lane = index % LANES;
  let team = index / LANES;
  let b = group.z;
  let first_row = (params.first_group + group.x) * TEAMS * ROWS;   // of the workgroup
  if (first_row >= flash_count()) { return; }
  let row = first_row + team * ROWS;             // of the team
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
  // The same range for the whole workgroup, because of the barriers.
  let seen = flash_keys(b, first_row, TEAMS * ROWS);
  let end = seen.y;
  for (var base = seen.x; base < end; base += STEP) {
    //@ unroll k in 0..KEYS
    let j$k = base + $ku * LANES + lane;
    let k_at$k = k_at + min(j$k, end - 1u) * params.k_row;
    //@ unroll r in 0..ROWS
    var dot$r_$k = vec4<f32>();
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
        dot$r_$k = fma(q, k$k, dot$r_$k);
        //@ end
      }
      //@ end
    }
    workgroupBarrier();                          // the last step's probabilities have been read
    //@ unroll r in 0..ROWS
    let p_at$r = (team * ROWS + $ru) * STEP;
    var keep$r = 1.0;
    {
      var high = LOWEST;
      //@ unroll k in 0..KEYS
      let score$k = flash_score(dot(dot$r_$k, vec4<f32>(query_scale())), b, row$r, j$k);
      high = max(high, score$k);
      //@ end
      high = max(max$r, team_max(high));
      keep$r = exp2(max$r - high);
      var part = 0.0;
      //@ unroll k in 0..KEYS
      let p$k = select(0.0, exp2(score$k - high), score$k > LOWEST);
      part += p$k;
      probability[p_at$r + $ku * LANES + lane] = p$k;
      //@ end
      max$r = high;
      sum$r = fma(sum$r, keep$r, part);          // of this lane's keys; added up at the end
    }
    //@ unroll s in 0..VALUE_SLOTS
    o$r_$s *= keep$r;
    //@ end
    //@ end
    workgroupBarrier();
    let count = min(STEP, end - base);
    for (var k = 0u; k < count; k++) {
      //@ unroll r in 0..ROWS
      let weight$r = probability[p_at$r + k];
      //@ end
      //@ unroll s in 0..VALUE_SLOTS
      {
        let v = values_load(v_at + (base + k) * params.v_row, min(lane + $su * LANES, VALUE_WIDTH - 1u));
        //@ unroll r in 0..ROWS
        o$r_$s = fma(vec4<f32>(weight$r), v, o$r_$s);
        //@ end
      }
      //@ end
    }
  }
  //@ unroll r in 0..ROWS
  {
    let total = team_add(sum$r);
    if (row + $ru < flash_count()) {
      let factor = finish(b, row$r.h, row$r.i, max$r, total, lane == 0u);
      let at = flash_output(b, row$r);
      //@ unroll s in 0..VALUE_SLOTS
      if (lane + $su * LANES < VALUE_WIDTH) { out_store(at, lane + $su * LANES, select(vec4<f32>(), o$r_$s * factor, factor > 0.0)); }
      //@ end
    }
  }
  //@ end
}
