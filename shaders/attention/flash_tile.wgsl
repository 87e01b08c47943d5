// Attention of many queries by tiles in registers: o = softmax(adjust(scale * q . K)) . V                             reference.attention
// A workgroup computes TILE_ROWS rows, as flash_rows numbers them, and walks over the keys that any of them sees, TILE_KEYS at a time.
// LANES invocations share a row; an invocation has 4 * ROW_QUADS rows, for which it computes the scores of 4 * KEY_QUADS keys of a tile and VALUE_QUADS
// vec4s of the outputs. Queries, keys and values go through workgroup memory, SLICE vec4s of the rows of a tile or 4 * SLICE values at a time. The
// next slice is fetched into registers while one is multiplied; that of queries, which are near, only if Q_AHEAD: where there are registers left.
// Probabilities go through workgroup memory, those of 4 * P_QUADS keys at a time.
// FlashAttention (Dao et al. 2022), online softmax (Milakov and Gimelshein 2018). Scores are in log2 units.
// In workgroup memory numbers lie in fours that the arithmetic takes at once: of queries and keys a channel of four rows, of probabilities four rows
// of a key. The outer index is constant where it matters, so that one check of bounds serves many loads; orders are rotated so that lanes share no bank.
// Workgroup memory: 64 * (ROW_QUADS * SLICE * WORKGROUP / LANES + max(KEY_QUADS, VALUE_QUADS) * SLICE * LANES + ROW_QUADS * P_QUADS * WORKGROUP / LANES),
// and that of the team part.
// Options: HEAD_DIM, VALUE_DIM, LANES, ROW_QUADS, KEY_QUADS, VALUE_QUADS = VALUE_WIDTH / LANES (rounded up), SLICE, P_QUADS, UNROLL, PLAIN, Q_AHEAD,
// WORKGROUP, and what an invocation fetches of a slice: Q_LOADS, K_LOADS (four rows each), V_LOADS; LANES, WORKGROUP / LANES, UNROLL <= SLICE <=
// P_QUADS <= LANES are powers of two;
// parts: problem, lengths_*, rows_* and fetch_* as query, keys and values, adjust_*, flash_rows, team_*, store_* as out, finish, sink_*, lse_*.

const DOWN = WORKGROUP / LANES;                  // invocations below each other
const ROW_QUADS_ALL = ROW_QUADS * DOWN;
const KEY_QUADS_ALL = KEY_QUADS * LANES;
const VALUE_QUADS_ALL = VALUE_QUADS * LANES;
const TILE_ROWS = 4u * ROW_QUADS_ALL;
const TILE_KEYS = 4u * KEY_QUADS_ALL;

var<workgroup> q_tile: array<array<vec4<f32>, SLICE * DOWN>, 4u * ROW_QUADS>;                              // [channel, quad of a lane][vec4, lane]
var<workgroup> kv_tile: array<array<vec4<f32>, SLICE * LANES>, 4u * max(KEY_QUADS, VALUE_QUADS)>;          // the same; or [key, vec4 of a lane][quad, lane]
var<workgroup> p_tile: array<array<vec4<f32>, P_QUADS * DOWN>, 4u * ROW_QUADS>;                  // [key, quad of a lane][quad of keys, lane]

fn q_slot(c: u32, down: u32) -> u32 { return c * DOWN + ((down + 2u * c) & (DOWN - 1u)); }
fn k_slot(c: u32, across: u32) -> u32 { return c * LANES + ((across + 2u * c) & (LANES - 1u)); }
fn p_slot(quad: u32, down: u32) -> u32 { return quad * DOWN + ((down + quad) & (DOWN - 1u)); }
@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  team_index = index;
  let across = index % LANES;
  let down = index / LANES;
  let b = group.z;
  let head = group.x;
  let first_row = (params.first_group + groups.y - 1u - group.y) * TILE_ROWS;     // late rows see the most keys where the rule is causal: they begin
  if (first_row >= flash_count()) { return; }
  let k_at = b * params.k_batch + head * params.k_head;
  let v_at = b * params.v_batch + head * params.v_head;
  let p_at = p_slot(across % P_QUADS, down);     // where this lane's probabilities go
  let seen = flash_keys(b, first_row, TILE_ROWS);
  let all_from = first_key(b, (min(first_row + TILE_ROWS, flash_count()) - 1u) / flash_ratio());     // every row sees the keys from here
  let all_to = end_key(b, first_row / flash_ratio());                                                // to here
  let last = max(seen.y, 1u) - 1u;               // in the place of keys behind it, which may be NaN: a probability of 0 would not hide that
  //@ unroll h in 0..ROW_QUADS
  var max$h = vec4<f32>(LOWEST);
  var sum$h = vec4<f32>();                       // of this lane's keys; added up at the end
  //@ unroll r in 0..4
  //@ unroll s in 0..VALUE_QUADS
  var o$h_$r_$s = vec4<f32>();
  //@ end
  //@ end
  //@ end
  // What this invocation brings of a slice, and the first of it.
  //@ unroll n in 0..Q_LOADS
  let q_c$n = ($nu * WORKGROUP + WORKGROUP - 1u - index) % SLICE;             // from the end: where few bring queries, others bring keys
  let q_quad$n = ($nu * WORKGROUP + WORKGROUP - 1u - index) / SLICE;
  //@ unroll r in 0..4
  let q_at$n_$r = flash_query(b, flash_row(b, head, first_row + q_quad$n * 4u + $ru));
  var q$n_$r: query_stored;
  if (Q_AHEAD) { q$n_$r = query_fetch(q_at$n_$r, min(q_c$n, WIDTH - 1u)); }
  //@ end
  //@ end
  //@ unroll n in 0..K_LOADS
  let k_c$n = (index + $nu * WORKGROUP) % SLICE;
  let k_quad$n = (index + $nu * WORKGROUP) / SLICE;
  //@ unroll r in 0..4
  var k$n_$r = keys_fetch(k_at + min(seen.x + k_quad$n * 4u + $ru, last) * params.k_row, min(k_c$n, WIDTH - 1u));
  //@ end
  //@ end
  //@ unroll n in 0..V_LOADS
  let v_key$n = (index + $nu * WORKGROUP) / VALUE_QUADS_ALL;
  let v_c$n = (index + $nu * WORKGROUP) % VALUE_QUADS_ALL;
  let v_column$n = min(v_c$n, VALUE_WIDTH - 1u);
  var v$n: values_stored;
  //@ end
  for (var base = seen.x; base < seen.y; base += TILE_KEYS) {
    let count = min(TILE_KEYS, seen.y - base);
    //@ unroll h in 0..ROW_QUADS
    //@ unroll r in 0..4
    //@ unroll g in 0..KEY_QUADS
    var s$h_$r_$g = vec4<f32>();
    //@ end
    //@ end
    //@ end
    for (var first = 0u; first < WIDTH; first += SLICE) {
      //@ unroll n in 0..Q_LOADS
      if (q_quad$n < ROW_QUADS_ALL) {
        let at = q_slot(q_c$n, q_quad$n % DOWN);
        let c = min(first + q_c$n, WIDTH - 1u);
        let scale = select(0.0, query_scale(), first + q_c$n < WIDTH);
        //@ unroll r in 0..4
        if (!Q_AHEAD) { q$n_$r = query_fetch(q_at$n_$r, c); }
        //@ end
        //@ unroll r in 0..4
        let x$r = query_decode(q$n_$r, c) * scale;
        //@ end
        //@ unroll e in 0..4
        q_tile[$eu * ROW_QUADS + q_quad$n / DOWN][at] = vec4<f32>(x0[$e], x1[$e], x2[$e], x3[$e]);
        //@ end
      }
      //@ end
      //@ unroll n in 0..K_LOADS
      if (k_quad$n < KEY_QUADS_ALL) {
        let at = k_slot(k_c$n, k_quad$n % LANES);
        let c = min(first + k_c$n, WIDTH - 1u);
        //@ unroll r in 0..4
        let x$r = keys_decode(k$n_$r, c);
        //@ end
        //@ unroll e in 0..4
        kv_tile[$eu * KEY_QUADS + k_quad$n / LANES][at] = vec4<f32>(x0[$e], x1[$e], x2[$e], x3[$e]);
        //@ end
      }
      //@ end
      workgroupBarrier();
      let next = first + SLICE;
      if (next < WIDTH) {
        //@ unroll n in 0..Q_LOADS
        //@ unroll r in 0..4
        if (Q_AHEAD) { q$n_$r = query_fetch(q_at$n_$r, min(next + q_c$n, WIDTH - 1u)); }
        //@ end
        //@ end
        //@ unroll n in 0..K_LOADS
        //@ unroll r in 0..4
        k$n_$r = keys_fetch(k_at + min(base + k_quad$n * 4u + $ru, last) * params.k_row, min(next + k_c$n, WIDTH - 1u));
        //@ end
        //@ end
      } else {
        //@ unroll n in 0..V_LOADS
        v$n = values_fetch(v_at + min(base + v_key$n, last) * params.v_row, v_column$n);
        //@ end
      }
      for (var c0 = 0u; c0 < SLICE; c0 += UNROLL) {
        //@ unroll c in 0..UNROLL
        {
          let q_at = q_slot(c0 + $cu, down);
          let k_at = k_slot(c0 + $cu, across);
          //@ unroll e in 0..4
          {
            //@ unroll g in 0..KEY_QUADS
            let k$g = kv_tile[$eu * KEY_QUADS + $gu][k_at];
            //@ end
            //@ unroll h in 0..ROW_QUADS
            {
              let q = q_tile[$eu * ROW_QUADS + $hu][q_at];
              //@ unroll r in 0..4
              //@ unroll g in 0..KEY_QUADS
              s$h_$r_$g = fma(vec4<f32>(q[$r]), k$g, s$h_$r_$g);
              //@ end
              //@ end
            }
            //@ end
          }
          //@ end
        }
        //@ end
      }
      workgroupBarrier();
    }
    // Scores as vectors of four rows.
    //@ unroll g in 0..KEY_QUADS
    //@ unroll h in 0..ROW_QUADS
    //@ unroll e in 0..4
    var x$g_$h_$e = vec4<f32>(s$h_0_$g[$e], s$h_1_$g[$e], s$h_2_$g[$e], s$h_3_$g[$e]);
    //@ end
    //@ end
    //@ end
    if (!(PLAIN && base >= all_from && base + TILE_KEYS <= all_to)) {
      //@ unroll h in 0..ROW_QUADS
      {
        //@ unroll r in 0..4
        let row$r = flash_row(b, head, first_row + (down + $hu * DOWN) * 4u + $ru);
        //@ end
        //@ unroll g in 0..KEY_QUADS
        //@ unroll e in 0..4
        {
          let j = base + (across + $gu * LANES) * 4u + $eu;
          let x = x$g_$h_$e;
          x$g_$h_$e = vec4<f32>(flash_score(x.x, b, row0, j), flash_score(x.y, b, row1, j), flash_score(x.z, b, row2, j), flash_score(x.w, b, row3, j));
        }
        //@ end
        //@ end
      }
      //@ end
    }
    //@ unroll h in 0..ROW_QUADS
    {
      var high = vec4<f32>(LOWEST);
      //@ unroll g in 0..KEY_QUADS
      //@ unroll e in 0..4
      high = max(high, x$g_$h_$e);
      //@ end
      //@ end
      high = max(max$h, team_max4(high));
      let keep = exp2(max$h - high);
      var part = vec4<f32>();
      //@ unroll g in 0..KEY_QUADS
      //@ unroll e in 0..4
      x$g_$h_$e = select(exp2(x$g_$h_$e - high), vec4<f32>(), x$g_$h_$e <= vec4<f32>(LOWEST));
      part += x$g_$h_$e;
      //@ end
      //@ end
      max$h = high;
      sum$h = fma(sum$h, keep, part);
      //@ unroll r in 0..4
      //@ unroll s in 0..VALUE_QUADS
      o$h_$r_$s *= keep[$r];
      //@ end
      //@ end
    }
    //@ end
    for (var first = 0u; first < count; first += 4u * SLICE) {
      if (first % (4u * P_QUADS) == 0u) {
        //@ unroll g in 0..KEY_QUADS
        if (first / (4u * P_QUADS) == (across + $gu * LANES) / P_QUADS) {
          //@ unroll h in 0..ROW_QUADS
          //@ unroll e in 0..4
          p_tile[$eu * ROW_QUADS + $hu][p_at] = x$g_$h_$e;
          //@ end
          //@ end
        }
        //@ end
      }
      //@ unroll n in 0..V_LOADS
      if (v_key$n < 4u * SLICE) {
        kv_tile[v_key$n % 4u * VALUE_QUADS + v_c$n / LANES][v_key$n / 4u * LANES + v_c$n % LANES] = values_decode(v$n, v_column$n);
      }
      //@ end
      workgroupBarrier();
      let next = first + 4u * SLICE;
      if (next < count) {
        //@ unroll n in 0..V_LOADS
        v$n = values_fetch(v_at + min(base + next + v_key$n, last) * params.v_row, v_column$n);
        //@ end
      } else if (base + TILE_KEYS < seen.y) {
        //@ unroll n in 0..Q_LOADS
        //@ unroll r in 0..4
        if (Q_AHEAD) { q$n_$r = query_fetch(q_at$n_$r, min(q_c$n, WIDTH - 1u)); }
        //@ end
        //@ end
        //@ unroll n in 0..K_LOADS
        //@ unroll r in 0..4
        k$n_$r = keys_fetch(k_at + min(base + TILE_KEYS + k_quad$n * 4u + $ru, last) * params.k_row, min(k_c$n, WIDTH - 1u));
        //@ end
        //@ end
      }
      for (var quad0 = 0u; quad0 < SLICE; quad0 += UNROLL) {
        //@ unroll c in 0..UNROLL
        {
          let p_at = p_slot((first / 4u + quad0 + $cu) % P_QUADS, down);
          let v_at = (quad0 + $cu) * LANES + across;
          //@ unroll e in 0..4
          {
            //@ unroll s in 0..VALUE_QUADS
            let v$s = kv_tile[$eu * VALUE_QUADS + $su][v_at];
            //@ end
            //@ unroll h in 0..ROW_QUADS
            {
              let p = p_tile[$eu * ROW_QUADS + $hu][p_at];
              //@ unroll r in 0..4
              //@ unroll s in 0..VALUE_QUADS
              o$h_$r_$s = fma(vec4<f32>(p[$r]), v$s, o$h_$r_$s);
              //@ end
              //@ end
            }
            //@ end
          }
          //@ end
        }
        //@ end
      }
      workgroupBarrier();
    }
  }
  //@ unroll h in 0..ROW_QUADS
  {
    let total = team_add4(sum$h);
    let row = first_row + (down + $hu * DOWN) * 4u;
    //@ unroll r in 0..4
    if (row + $ru < flash_count()) {
      let one = flash_row(b, head, row + $ru);
      let factor = finish(b, one.h, one.i, max$h[$r], total[$r], across == 0u);
      let at = flash_output(b, one);
      //@ unroll s in 0..VALUE_QUADS
      if (across + $su * LANES < VALUE_WIDTH) { out_store(at, across + $su * LANES, select(o$h_$r_$s * factor, vec4<f32>(), factor <= 0.0)); }
      //@ end
    }
    //@ end
  }
  //@ end
}
