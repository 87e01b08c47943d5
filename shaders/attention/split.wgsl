// Attention of a few queries over many keys, the keys split among workgroups: o = softmax(adjust(scale * q . K)) . V   reference.attention
// One workgroup: GROUP query heads that share a KV head, one query, one split of its keys; each key is read once for all of them.
// A team of LANES invocations takes every TEAMS-th key, KEYS of them at a time, and keeps its own online softmax: each lane has a few channels of
// all KEYS keys, and the sums over lanes leave it with the score of one key a head (see split_team_*), so that nothing of a softmax is done twice.
// Keys are loaded a round ahead, as soon as the last ones have been used.
// The teams are merged at the end, those of one subgroup by its operations, then through workgroup memory: all heads at once where there is room.
// Online softmax: Milakov and Gimelshein 2018; split keys: flash-decoding (Dao et al. 2023). Scores are in log2 units.
// Workgroup memory: HEADS_AT_ONCE * MERGED * (16 * VALUE_WIDTH + 8).
// Options: HEAD_DIM, VALUE_DIM, GROUP, SHARERS (workgroups that share a key), ONE_QUERY (one sequence, one query), HEADS_AT_ONCE (1 or GROUP), LANES,
// KEYS (a power of two, at most LANES and 8), WIDE (vec4s in a unit of a row: what a lane loads at once), UNITS and VALUE_UNITS = ceil(units in a row / LANES),
// MERGED (softmaxes of a head that meet in workgroup memory), WORKGROUP; parts: problem, lengths_*, rows_* as query, split_rows_* as keys and values,
// adjust_*, split_team_*, split_one, split_many or split_slice.

const TEAMS = WORKGROUP / LANES;
const FOLDED = WORKGROUP / MERGED;               // invocations that end with one result

var<workgroup> merge_out: array<vec4<f32>, HEADS_AT_ONCE * MERGED * VALUE_WIDTH>;
var<workgroup> merge_max: array<f32, HEADS_AT_ONCE * MERGED>;
var<workgroup> merge_sum: array<f32, HEADS_AT_ONCE * MERGED>;

fn products(q: vec4<f32>, k: vec4<f32>, sum: f32) -> f32 { return fma(q.x, k.x, fma(q.y, k.y, fma(q.z, k.z, fma(q.w, k.w, sum)))); }

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  team_index = index;
  var number = params.first_group + group.x + group.y * groups.x;   // linear: batch, query, group of heads
  var i = 0u;
  var b = 0u;
  if (!ONE_QUERY) {                              // divisions take long where little else happens
    let row = number / (params.kv_heads * SHARERS);
    number -= row * (params.kv_heads * SHARERS);
    b = row / params.queries;
    i = row - b * params.queries;
  }
  if (b >= params.batch || i >= query_count() || number >= params.kv_heads * SHARERS) { return; }
  split_ahead(number, index);
  let h = number * GROUP;
  let lane = index % LANES;
  let team = index / LANES;
  let first = first_key(b, i);
  let last = max(first, end_key(b, i));
  let share = split_share(last - first);
  let begin = min(first + group.z * share, last);
  let end = min(begin + share, last);
  let bottom = max(end, 1u) - 1u;                // rows beyond it are not read
  let k_at = b * params.k_batch + number / SHARERS * params.k_head;
  let v_at = b * params.v_batch + number / SHARERS * params.v_head;
  //@ unroll t in 0..UNITS
  let unit$t = min(lane + $tu * LANES, WIDTH / WIDE - 1u);
  let used$t = select(0.0, query_scale(), lane + $tu * LANES < WIDTH / WIDE);
  //@ unroll u in 0..KEYS
  var k$u_$t = keys_unit(k_at + min(begin + $uu * TEAMS + team, bottom) * params.k_row, unit$t);
  //@ end
  //@ end
  //@ unroll g in 0..GROUP
  var max$g = LOWEST;
  var sum$g = 0.0;                               // of the lane's keys
  //@ unroll t in 0..UNITS
  //@ unroll w in 0..WIDE
  let q$g_$t_$w = query_load(b * params.q_batch + (h + $gu) * params.q_head + i * params.q_row, unit$t * WIDE + $wu) * used$t;
  //@ end
  //@ end
  //@ unroll t in 0..VALUE_UNITS
  //@ unroll w in 0..WIDE
  var o$g_$t_$w = vec4<f32>();
  //@ end
  //@ end
  //@ end
  let rounds = (end - begin + TEAMS * KEYS - 1u) / (TEAMS * KEYS);   // the same for all teams: one without a key in the last round adds nothing
  for (var round = 0u; round < rounds; round++) {
    let at = begin + round * (TEAMS * KEYS) + team;
    //@ unroll t in 0..VALUE_UNITS
    let value_unit$t = min(lane + $tu * LANES, VALUE_WIDTH / WIDE - 1u);
    //@ unroll u in 0..KEYS
    let v$u_$t = values_unit(v_at + min(at + $uu * TEAMS, bottom) * params.v_row, value_unit$t);
    //@ end
    //@ end
    //@ unroll g in 0..GROUP
    var sums$g = array<f32, KEYS>();
    //@ end
    //@ unroll u in 0..KEYS
    //@ unroll t in 0..UNITS
    //@ unroll w in 0..WIDE
    {
      let k = keys_vec4_$w(k$u_$t);
      //@ unroll g in 0..GROUP
      sums$g[$u] = products(q$g_$t_$w, k, sums$g[$u]);
      //@ end
    }
    //@ end
    //@ end
    //@ end
    //@ unroll t in 0..UNITS
    //@ unroll u in 0..KEYS
    k$u_$t = keys_unit(k_at + min(at + ($uu + KEYS) * TEAMS, bottom) * params.k_row, unit$t);
    //@ end
    //@ end
    let key = at + lane % KEYS * TEAMS;          // the lane's
    //@ unroll g in 0..GROUP
    let score$g = select(LOWEST, adjust(team_score(sums$g), b, h + $gu, i, min(key, bottom)), key < end);
    let higher$g = max(max$g, team_max(score$g));
    let keep$g = exp2(max$g - higher$g);
    let p$g = select(exp2(score$g - higher$g), 0.0, score$g <= LOWEST);
    max$g = higher$g;
    sum$g = fma(sum$g, keep$g, p$g);
    //@ unroll t in 0..VALUE_UNITS
    //@ unroll w in 0..WIDE
    o$g_$t_$w *= keep$g;
    //@ end
    //@ end
    //@ end
    //@ unroll u in 0..KEYS
    {
      //@ unroll g in 0..GROUP
      let p$g_$u = team_from(p$g, $uu);
      //@ end
      //@ unroll t in 0..VALUE_UNITS
      //@ unroll w in 0..WIDE
      let value$t_$w = values_vec4_$w(v$u_$t);
      //@ unroll g in 0..GROUP
      o$g_$t_$w = fma(vec4<f32>(p$g_$u), value$t_$w, o$g_$t_$w);
      //@ end
      //@ end
      //@ end
    }
    //@ end
  }
  let merged = index / FOLDED;
  //@ unroll g in 0..GROUP
  {
    let top = fold_max(max$g);
    let weight = exp2(max$g - top);
    let total = fold_add(team_total(sum$g) * weight);
    let at = $gu % HEADS_AT_ONCE * MERGED + merged;
    if (HEADS_AT_ONCE == 1u) { workgroupBarrier(); }
    if (index % FOLDED == 0u) {
      merge_max[at] = top;
      merge_sum[at] = total;
    }
    //@ unroll t in 0..VALUE_UNITS
    //@ unroll w in 0..WIDE
    {
      let out = fold_add4(o$g_$t_$w * weight);
      let c = (lane + $tu * LANES) * WIDE + $wu;
      if (index % FOLDED < LANES && c < VALUE_WIDTH) { merge_out[at * VALUE_WIDTH + c] = out; }
    }
    //@ end
    //@ end
    if (HEADS_AT_ONCE == 1u) {
      workgroupBarrier();
      for (var c = index; c < VALUE_WIDTH; c += WORKGROUP) { merge(b, h + $gu, i, group.z, c, 0u); }
    }
  }
  //@ end
  if (HEADS_AT_ONCE > 1u) {
    workgroupBarrier();
    for (var n = index; n < GROUP * VALUE_WIDTH; n += WORKGROUP) { merge(b, h + n / VALUE_WIDTH, i, group.z, n % VALUE_WIDTH, n / VALUE_WIDTH * MERGED); }
  }
  split_end(number, index);
}

fn merge(b: u32, h: u32, i: u32, split: u32, c: u32, first: u32) {
  var highest = LOWEST;
  //@ unroll m in 0..MERGED
  let top$m = merge_max[first + $mu];
  highest = max(highest, top$m);
  //@ end
  var sum = 0.0;
  var v = vec4<f32>();
  //@ unroll m in 0..MERGED
  {
    let weight = exp2(top$m - highest);
    sum = fma(weight, merge_sum[first + $mu], sum);
    v = fma(vec4<f32>(weight), merge_out[(first + $mu) * VALUE_WIDTH + c], v);
  }
  //@ end
  split_store(b, h, i, split, c, v, sum, highest);
}
