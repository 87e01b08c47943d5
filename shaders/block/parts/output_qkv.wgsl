// Rows of Q, K, V one after the other: Q and K are rotated, Q goes to `query`, K and V to their row of the cache.   reference.apply_rope
// Rows come in fours. Within the rotary part of a head they are the two pairs (2u, 2u + 1): PAIR_DISTANCE 1 keeps pairs (2i, 2i + 1)
// of neighbouring channels, PAIR_DISTANCE ROTARY / 2 pairs channel i with i + ROTARY / 2; W's rows were put in pair order when packed.
// ROTARY 0 rotates nothing.   Options: HEADS, KV_HEADS, HEAD_DIM, ROTARY, PAIR_DISTANCE, QUADS; parts: cache_store_*, end_none.
var<storage, read> rope: array<vec2<f32>>;       // (positions, ROTARY / 2) of (cos, sin) f32
var<storage, read_write> query: array<vec2<f32>>; // (tokens, y_stride) f32, a row being (HEADS, HEAD_DIM)
fn output(row: u32, token: u32, results: array<f32, ROWS>) {
  //@ unroll r in 0..QUADS
  if (row + 4u * $ru < params.rows) {
    output_quad(params.first_row + row + 4u * $ru, token, vec4<f32>(results[4u * $ru], results[4u * $ru + 1u], results[4u * $ru + 2u], results[4u * $ru + 3u]));
  }
  //@ end
}
fn output_quad(row: u32, token: u32, v: vec4<f32>) {
  let head = row / HEAD_DIM;
  let channel = row % HEAD_DIM;
  let position = step.position + token;
  var low = v.xy;                                // channels `at`, `at` + 1
  var high = v.zw;                               // channels `at` + `apart`, + 1
  var at = channel;
  var apart = 2u;
  if (head < HEADS + KV_HEADS && channel < ROTARY) {
    let turn = position * (ROTARY / 2u) + channel / 2u;
    let a = rope[turn];
    let b = rope[turn + 1u];
    let first = vec2<f32>(v.x * a.x - v.y * a.y, v.x * a.y + v.y * a.x);
    let second = vec2<f32>(v.z * b.x - v.w * b.y, v.z * b.y + v.w * b.x);
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
