// Attention of a few queries over many keys, the keys split among workgroups: o = softmax(adjust(scale * q . K)) . V   reference.attention
// One workgroup: GROUP query heads that share a KV head, one query, one split of its keys; each key is read once for all of them.
// A team of LANES invocations takes every TEAMS-th key and keeps its own online softmax; the teams are merged at the end.
// Online softmax: Milakov and Gimelshein 2018; split keys: flash-decoding (Dao et al. 2023). Scores are in log2 units.
// Workgroup memory: TEAMS * (16 * VALUE_WIDTH + 8), and that of the team part.
// Options: HEAD_DIM, VALUE_DIM, GROUP, LANES, SLOTS and VALUE_SLOTS = ceil(WIDTH or VALUE_WIDTH / LANES), WORKGROUP;
// parts: problem, lengths_*, rows_* as query, keys and values, adjust_*, team_*, split_*.

const TEAMS = WORKGROUP / LANES;

var<workgroup> merge_out: array<vec4<f32>, TEAMS * VALUE_WIDTH>;
var<workgroup> merge_max: array<f32, TEAMS>;
var<workgroup> merge_sum: array<f32, TEAMS>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  team_index = index;
  let number = group.x + group.y * groups.x;     // linear: batch, query, group of heads
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
  let rounds = (end - begin + TEAMS - 1u) / TEAMS;   // the same for all teams: one without a key in the last round adds nothing
  for (var round = 0u; round < rounds; round++) {
    let key = begin + round * TEAMS + team;
    let valid = key < end;
    let j = min(key, end - 1u);
    //@ unroll s in 0..SLOTS
    let k$s = keys_load(k_at + j * params.k_row, slot$s);
    //@ end
    //@ unroll s in 0..VALUE_SLOTS
    let v$s = values_load(v_at + j * params.v_row, min(lane + $su * LANES, VALUE_WIDTH - 1u));
    //@ end
    //@ unroll g in 0..GROUP
    {
      var products = vec4<f32>();
      //@ unroll s in 0..SLOTS
      products = fma(q$g_$s, k$s, products);
      //@ end
      let score = select(LOWEST, adjust(team_add(dot(products, vec4<f32>(1.0))), b, h + $gu, i, j), valid);
      let higher = max(max$g, score);
      let keep = exp2(max$g - higher);
      let p = select(0.0, exp2(score - higher), score > LOWEST);
      max$g = higher;
      sum$g = fma(sum$g, keep, p);
      //@ unroll s in 0..VALUE_SLOTS
      o$g_$s = fma(o$g_$s, vec4<f32>(keep), p * v$s);
      //@ end
    }
    //@ end
  }
  //@ unroll g in 0..GROUP
  workgroupBarrier();
  if (lane == 0u) {
    merge_max[team] = max$g;
    merge_sum[team] = sum$g;
  }
  //@ unroll s in 0..VALUE_SLOTS
  if (lane + $su * LANES < VALUE_WIDTH) { merge_out[team * VALUE_WIDTH + lane + $su * LANES] = o$g_$s; }
  //@ end
  workgroupBarrier();
  for (var c = index; c < VALUE_WIDTH; c += WORKGROUP) { merge(b, h + $gu, i, group.z, c); }
  //@ end
}

fn merge(b: u32, h: u32, i: u32, split: u32, c: u32) {
  var highest = LOWEST;
  for (var t = 0u; t < TEAMS; t++) { highest = max(highest, merge_max[t]); }
  var sum = 0.0;
  var v = vec4<f32>();
  for (var t = 0u; t < TEAMS; t++) {
    let weight = exp2(merge_max[t] - highest);
    sum = fma(weight, merge_sum[t], sum);
    v = fma(vec4<f32>(weight), merge_out[t * VALUE_WIDTH + c], v);
  }
  split_store(b, h, i, split, c, v, sum, highest);
}
