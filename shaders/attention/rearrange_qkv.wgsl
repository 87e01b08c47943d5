// Queries, keys and values as padded matrices for xgemm_batched.wgsl, zero where there is nothing: queries and keys transposed, so that
// the product runs over rows; values not. Keys and values that no query sees become zero, whatever they hold.
// Each invocation moves 4 positions x 4 channels. One workgroup: 32 x 32 of one plane.
// Workgroup memory: none.
// Options: HEAD_DIM, VALUE_DIM; parts: problem, lengths_*, matrices, rows_* as query, keys and values.

var<storage, read_write> queries_t: array<vec4<f32>>;   // (planes, depth, rows) f32
var<storage, read_write> keys_t: array<vec4<f32>>;      // (KV planes, depth, columns) f32
var<storage, read_write> values_p: array<vec4<f32>>;    // (KV planes, columns, channels) f32

@compute @workgroup_size(8, 8)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let t = id.x * 4u;
  let c = id.y * 4u;
  let z = id.z;
  if (t < matrices.rows && c < matrices.depth) { move_queries(z, t, c); }
  if (z > kv_plane(matrices.planes - 1u) || t >= matrices.columns) { return; }
  let kv = matrices.first / (params.heads / params.kv_heads) + z;
  let b = kv / params.kv_heads;
  let begin = first_key(b, 0u);
  let end = end_key(b, max(query_count(), 1u) - 1u);
  if (c < matrices.depth) { move_keys(z, b, kv % params.kv_heads, t, c, begin, end); }
  if (c < matrices.channels) { move_values(z, b, kv % params.kv_heads, t, c, begin, end); }
}

fn move_queries(z: u32, t: u32, c: u32) {
  let at = batch_of(z) * params.q_batch + head_of(z) * params.q_head;
  //@ unroll r in 0..4
  let q$r = select(vec4<f32>(), query_load(at + min(t + $ru, params.queries - 1u) * params.q_row, min(c / 4u, WIDTH - 1u)), t + $ru < query_count() && c / 4u < WIDTH);
  //@ end
  //@ unroll e in 0..4
  queries_t[((z * matrices.depth + c + $eu) * matrices.rows + t) / 4u] = vec4<f32>(q0[$e], q1[$e], q2[$e], q3[$e]);
  //@ end
}

fn move_keys(z: u32, b: u32, head: u32, t: u32, c: u32, begin: u32, end: u32) {
  let at = b * params.k_batch + head * params.k_head;
  //@ unroll r in 0..4
  let k$r = select(vec4<f32>(), keys_load(at + min(t + $ru, end) * params.k_row, min(c / 4u, WIDTH - 1u)), t + $ru >= begin && t + $ru < end && c / 4u < WIDTH);
  //@ end
  //@ unroll e in 0..4
  keys_t[((z * matrices.depth + c + $eu) * matrices.columns + t) / 4u] = vec4<f32>(k0[$e], k1[$e], k2[$e], k3[$e]);
  //@ end
}

fn move_values(z: u32, b: u32, head: u32, t: u32, c: u32, begin: u32, end: u32) {
  let at = b * params.v_batch + head * params.v_head;
  //@ unroll r in 0..4
  values_p[((z * matrices.columns + t + $ru) * matrices.channels + c) / 4u] = select(vec4<f32>(),
    values_load(at + min(t + $ru, end) * params.v_row, min(c / 4u, VALUE_WIDTH - 1u)), t + $ru >= begin && t + $ru < end && c / 4u < VALUE_WIDTH);
  //@ end
}
