// Attention of a few queries over a long cache, keys split among workgroups: o = softmax(scale * q . K) . V     reference.attention
// One workgroup: GROUP query heads that share a KV head, one token, one split of its keys; each key is read once for all of them.
// A team of LANES invocations takes every TEAMS-th key and keeps its own online softmax; the teams are merged at the end.
// Online softmax: Milakov and Gimelshein 2018; split keys: flash-decoding (Dao et al. 2023). Scores are in log2 units.
// Workgroup memory: TEAMS * (16 * HEAD_DIM / 4 + 8), and that of the team part.
// Options: HEADS, KV_HEADS, HEAD_DIM, GROUP, LANES, SLOTS = ceil(HEAD_DIM / 4 / LANES), WORKGROUP; parts: step, cache_load_*, team_*, split_*.

struct Params { splits: u32, scale: f32 }

const WIDTH = HEAD_DIM / 4u;                     // vec4s a row
const TEAMS = WORKGROUP / LANES;
const LOWEST = -3.4028235e38;

var<uniform> params: Params;
var<storage, read> query: array<vec4<f32>>;      // (tokens, HEADS, HEAD_DIM) f32

var<workgroup> merge_out: array<vec4<f32>, TEAMS * WIDTH>;
var<workgroup> merge_max: array<f32, TEAMS>;
var<workgroup> merge_sum: array<f32, TEAMS>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let token = group.z;
  if (token >= step.count) { return; }
  team_index = index;
  let lane = index % LANES;
  let team = index / LANES;
  let head = group.x * GROUP;                    // GROUP divides HEADS / KV_HEADS
  let length = step.position + token + 1u;
  let share = (length + params.splits - 1u) / params.splits;
  let begin = min(group.y * share, length);
  let end = min(begin + share, length);
  let first_row = head / (HEADS / KV_HEADS) * cache_capacity() * WIDTH;
  //@ unroll s in 0..SLOTS
  let slot$s = min(lane + $su * LANES, WIDTH - 1u);
  let used$s = select(0.0, params.scale, lane + $su * LANES < WIDTH);
  //@ end
  //@ unroll g in 0..GROUP
  var max$g = LOWEST;
  var sum$g = 0.0;
  //@ unroll s in 0..SLOTS
  let q$g_$s = query[(token * HEADS + head + $gu) * WIDTH + slot$s] * used$s;
  var o$g_$s = vec4<f32>();
  //@ end
  //@ end
  let rounds = (end - begin + TEAMS - 1u) / TEAMS;   // the same for all teams: teams without a key in the last round add nothing
  for (var round = 0u; round < rounds; round++) {
    let key = begin + round * TEAMS + team;
    let valid = key < end;
    let row = first_row + min(key, end - 1u) * WIDTH;
    //@ unroll s in 0..SLOTS
    let k$s = keys_load(row + slot$s);
    let v$s = values_load(row + slot$s);
    //@ end
    //@ unroll g in 0..GROUP
    {
      var products = vec4<f32>();
      //@ unroll s in 0..SLOTS
      products = fma(q$g_$s, k$s, products);
      //@ end
      let score = select(LOWEST, team_add(dot(products, vec4<f32>(1.0))), valid);
      let higher = max(max$g, score);
      let keep = exp2(max$g - higher);
      let p = select(0.0, exp2(score - higher), valid);
      max$g = higher;
      sum$g = fma(sum$g, keep, p);
      //@ unroll s in 0..SLOTS
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
  //@ unroll s in 0..SLOTS
  if (lane + $su * LANES < WIDTH) { merge_out[team * WIDTH + slot$s] = o$g_$s; }
  //@ end
  workgroupBarrier();
  for (var i = index; i < WIDTH; i += WORKGROUP) { merge(token, head + $gu, group.y, i); }
  //@ end
}

fn merge(token: u32, head: u32, split: u32, i: u32) {
  var highest = LOWEST;
  for (var t = 0u; t < TEAMS; t++) { highest = max(highest, merge_max[t]); }
  var sum = 0.0;
  var out = vec4<f32>();
  for (var t = 0u; t < TEAMS; t++) {
    let weight = exp2(merge_max[t] - highest);
    sum = fma(weight, merge_sum[t], sum);
    out = fma(vec4<f32>(weight), merge_out[t * WIDTH + i], out);
  }
  split_store(token, head, split, i, out, sum, highest);
}
