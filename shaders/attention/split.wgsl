// Attention of a few queries over many keys, the keys split among workgroups: o = softmax(adjust(scale * q . K)) . V   reference.attention
// One workgroup: GROUP query heads that share a KV head, one query, one split of its keys; each key is read once for all of them.
// A team of LANES invocations takes every TEAMS-th key, KEYS of them at a time so that loads overlap, and keeps its own online softmax; the teams
// are merged at the end, those of one subgroup by its operations, then through workgroup memory: all heads at once where there is room.
// Online softmax: Milakov and Gimelshein 2018; split keys: flash-decoding (Dao et al. 2023). Scores are in log2 units.
// Workgroup memory: HEADS_AT_ONCE * MERGED * (16 * VALUE_WIDTH + 8), and that of the team part.
// Options: HEAD_DIM, VALUE_DIM, GROUP, HEADS_AT_ONCE (1 or GROUP), LANES, KEYS, SLOTS and VALUE_SLOTS = ceil(WIDTH or VALUE_WIDTH / LANES), WORKGROUP;
// parts: problem, lengths_*, rows_* as query, keys and values, adjust_*, team_*, split_fold_*, split_one or split_many.

const TEAMS = WORKGROUP / LANES;
const MERGED = WORKGROUP / FOLDED;               // softmaxes of a head that meet in workgroup memory

var<workgroup> merge_out: array<vec4<f32>, HEADS_AT_ONCE * MERGED * VALUE_WIDTH>;
var<workgroup> merge_max: array<f32, HEADS_AT_ONCE * MERGED>;
var<workgroup> merge_sum: array<f32, HEADS_AT_ONCE * MERGED>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  team_index = index;
  let number = params.first_group + group.x + group.y * groups.x;   // linear: batch, query, group of heads
  let each = params.heads / GROUP;
  let h = number % each * GROUP;                 // GROUP divides heads / kv_heads
  let i = number / each % params.queries;
  let b = number / each / params.queries;
  if (b >= params.batch || i >= query_count()) { return; }
  let lane = index % LANES;
  let team = index / LANES;
  let first = first_key(b, i);
  let last = max(first, end_key(b, i));
  let share = (last - first + params.splits - 1u) / params.splits;
  let begin = min(first + group.z * share, last);
  let end = min(begin + share, last);
  let kv_head = h / (params.heads / params.kv_heads);
  let k_at = b * params.k_batch + kv_head * params.k_head;
  let v_at = b * params.v_batch + kv_head * params.v_head;
  //@ unroll s in 0..SLOTS
  let slot$s = min(lane + $su * LANES, WIDTH - 1u);
  let used$s = select(0.0, query_scale(), lane + $su * LANES < WIDTH);
  //@ end
  //@ unroll g in 0..GROUP
  var max$g = LOWEST;
  var sum$g = 0.0;
  //@ unroll s in 0..SLOTS
  let q$g_$s = query_load(b * params.q_batch + (h + $gu) * params.q_head + i * params.q_row, slot$s) * used$s;
  //@ end
  //@ unroll s in 0..VALUE_SLOTS
  var o$g_$s = vec4<f32>();
  //@ end
  //@ end
  let rounds = (end - begin + TEAMS * KEYS - 1u) / (TEAMS * KEYS);   // the same for all teams: one without a key in the last round adds nothing
  for (var round = 0u; round < rounds; round++) {
    //@ unroll u in 0..KEYS
    let key$u = begin + (round * KEYS + $uu) * TEAMS + team;
    let j$u = min(key$u, end - 1u);
    //@ unroll s in 0..SLOTS
    let k$u_$s = keys_load(k_at + j$u * params.k_row, slot$s);
    //@ end
    //@ unroll s in 0..VALUE_SLOTS
    let v$u_$s = values_load(v_at + j$u * params.v_row, min(lane + $su * LANES, VALUE_WIDTH - 1u));
    //@ end
    //@ end
    //@ unroll g in 0..GROUP
    {
      var higher = max$g;
      //@ unroll u in 0..KEYS
      var products$u = vec4<f32>();
      //@ unroll s in 0..SLOTS
      products$u = fma(q$g_$s, k$u_$s, products$u);
      //@ end
      let score$u = select(LOWEST, adjust(team_add(dot(products$u, vec4<f32>(1.0))), b, h + $gu, i, j$u), key$u < end);
      higher = max(higher, score$u);
      //@ end
      let keep = exp2(max$g - higher);
      max$g = higher;
      sum$g *= keep;
      //@ unroll s in 0..VALUE_SLOTS
      o$g_$s *= keep;
      //@ end
      //@ unroll u in 0..KEYS
      let p$u = select(0.0, exp2(score$u - higher), score$u > LOWEST);
      sum$g += p$u;
      //@ unroll s in 0..VALUE_SLOTS
      o$g_$s = fma(vec4<f32>(p$u), v$u_$s, o$g_$s);
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
    let total = fold_add(vec4<f32>(sum$g * weight, 0.0, 0.0, 0.0)).x;
    let at = $gu % HEADS_AT_ONCE * MERGED + merged;
    if (HEADS_AT_ONCE == 1u) { workgroupBarrier(); }
    if (index % FOLDED == 0u) {
      merge_max[at] = top;
      merge_sum[at] = total;
    }
    //@ unroll s in 0..VALUE_SLOTS
    let out$s = fold_add(o$g_$s * weight);
    if (index % FOLDED < LANES && lane + $su * LANES < VALUE_WIDTH) { merge_out[at * VALUE_WIDTH + lane + $su * LANES] = out$s; }
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
}

fn merge(b: u32, h: u32, i: u32, split: u32, c: u32, first: u32) {
  var highest = LOWEST;
  for (var t = 0u; t < MERGED; t++) { highest = max(highest, merge_max[first + t]); }
  var sum = 0.0;
  var v = vec4<f32>();
  for (var t = 0u; t < MERGED; t++) {
    let weight = exp2(merge_max[first + t] - highest);
    sum = fma(weight, merge_sum[first + t], sum);
    v = fma(vec4<f32>(weight), merge_out[(first + t) * VALUE_WIDTH + c], v);
  }
  split_store(b, h, i, split, c, v, sum, highest);
}
