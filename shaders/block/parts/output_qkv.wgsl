// Rows of Q, K, V one after the other: Q and K are rotated, Q goes to `query`, K and V to their row of the cache.   reference.apply_rope
// Rows come in fours. Within the rotary part of a head they are the two pairs (2u, 2u + 1): PAIR_DISTANCE 1 keeps pairs (2i, 2i + 1)
// of neighbouring channels, PAIR_DISTANCE ROTARY / 2 pairs channel i with i + ROTARY / 2; W's rows were put in pair order when packed.
// ROTARY 0 rotates nothing.   Options: HEADS, KV_HEADS, HEAD_DIM, ROTARY, PAIR_DISTANCE, QUADS; parts: cache_store_*, end_none.
var<storage, read> rope: array<vec2<f32>>;       // (positions, ROTARY / 2) of (cos, sin) f32
var<storage, read_write> query: array<vec2<f32>>; // (tokens, y_stride) f32, a row being (HEADS, HEAD_DIM)
fn output_turns(row: u32, token: u32) -> vec4<f32> {   // (cos, sin) of the two pairs of four rows
  if (row / HEAD_DIM >= HEADS + KV_HEADS || row % HEAD_DIM >= ROTARY) { return vec4<f32>(); }
  let turn = (step.position + token) * (ROTARY / 2u) + row % HEAD_DIM / 2u;
  return vec4<f32>(rope[turn], rope[turn + 1u]);
}
fn output_load(row: u32, token: u32) -> array<f32, ROWS> {
  var loaded: array<f32, ROWS>;
  //@ unroll r in 0..QUADS
  {
    let turns = output_turns(params.first_row + row + 4u * $ru, token);
    loaded[4u * $ru] = turns.x;
    loaded[4u * $ru + 1u] = turns.y;
    loaded[4u * $ru + 2u] = turns.z;
    loaded[4u * $ru + 3u] = turns.w;
  }
  //@ end
  return loaded;
}
fn output(row: u32, token: u32, results: array<f32, ROWS>, loaded: array<f32, ROWS>) {
  //@ unroll r in 0..QUADS
  if (row + 4u * $ru < params.rows) {
    let v = vec4<f32>(results[4u * $ru], results[4u * $ru + 1u], results[4u * $ru + 2u], results[4u * $ru + 3u]);
    let turns = vec4<f32>(loaded[4u * $ru], loaded[4u * $ru + 1u], loaded[4u * $ru + 2u], loaded[4u * $ru + 3u]);
    output_quad(params.first_row + row + 4u * $ru, token, v, turns);
  }
  //@ end
}
fn output_quad(row: u32, token: u32, v: vec4<f32>, turns: vec4<f32>) {
  let head = row / HEAD_DIM;
  let channel = row % HEAD_DIM;
  let position = step.position + token;
  var low = v.xy;                                // channels `at`, `at` + 1
  var high = v.zw;                               // channels `at` + `apart`, + 1
  var at = channel;
  var apart = 2u;
  if (head < HEADS + KV_HEADS && channel < ROTARY) {
    let first = vec2<f32>(v.x * turns.x - v.y * turns.y, v.x * turns.y + v.y * turns.x);
    let second = vec2<f32>(v.z * turns.z - v.w * turns.w, v.z * turns.w + v.w * turns.z);
    if (PAIR_DISTANCE == 1u) {
      low = first;
      high = second;
    } else {
      low = vec2<f32>(first.x, second.x);
      high = vec2<f32>(first.y, second.y);
      at = channel / 2u;
      apart = PAIR_DISTANCE;
    }
  }
  if (head < HEADS) {
    let i = (token * params.y_stride + head * HEAD_DIM + at) / 2u;
    query[i] = low;
    query[i + apart / 2u] = high;
  } else if (head < HEADS + KV_HEADS) {
    let i = cache_row(head - HEADS, position) + at / 2u;
    keys_store(i, low);
    keys_store(i + apart / 2u, high);
  } else {
    let i = cache_row(head - HEADS - KV_HEADS, position) + at / 2u;
    values_store(i, low);
    values_store(i + 1u, high);
  }
}
