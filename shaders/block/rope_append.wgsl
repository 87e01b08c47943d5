// Rotate the step's queries (in place) and keys, and put keys and values into the cache: what the projections' own epilogue does when fused.
//                                                                        reference.apply_rope, rms_norm
// One workgroup a head of a token, heads of Q, K and V one after the other; each invocation takes two pairs and writes
// where it read. With QK_NORM all read their head before any of them writes.
// Workgroup memory: that of cache_store_*.
// Options: HEADS, KV_HEADS, HEAD_DIM, ROTARY, PAIR_DISTANCE, QK_NORM, ROWS = 4, QUADS = 1, WORKGROUP = HEAD_DIM / 4; parts: step, output_qkv, cache_store_*.

struct Params { rows: u32, first_row: u32, y_stride: u32, kv_stride: u32, eps: f32 }

var<uniform> params: Params;                     // rows: of Q, K and V together
var<storage, read> new_keys: array<f32>;         // (tokens, kv_stride) f32
var<storage, read> new_values: array<f32>;       // (tokens, kv_stride) f32
var<storage, read> head_gamma: array<f32>;       // (2, HEAD_DIM) f32 of Q and of K, in pair order

fn load(head: u32, token: u32, c: u32) -> f32 {
  if (head < HEADS) {
    let i = token * params.y_stride + head * HEAD_DIM + c;
    let two = query[i / 2u];
    return select(two.x, two.y, i % 2u == 1u);
  }
  if (head < HEADS + KV_HEADS) { return new_keys[token * params.kv_stride + (head - HEADS) * HEAD_DIM + c]; }
  return new_values[token * params.kv_stride + (head - HEADS - KV_HEADS) * HEAD_DIM + c];
}

// The channel that stands at place r of a head in pair order.
fn channel(r: u32) -> u32 {
  if (r >= ROTARY || PAIR_DISTANCE == 1u) { return r; }
  return r / 2u + r % 2u * PAIR_DISTANCE;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let head = group.x;
  let token = group.y;
  if (token >= step.count) { return; }
  let turned = head < HEADS + KV_HEADS;
  let r = index * 4u;
  var v = vec4<f32>();
  for (var k = 0u; k < 4u; k++) { v[k] = load(head, token, select(r + k, channel(r + k), turned)); }
  if (QK_NORM) {
    var squares = 0.0;
    for (var c = 0u; c < HEAD_DIM; c++) {
      let value = load(head, token, c);
      squares = fma(value, value, squares);
    }
    storageBarrier();
    if (turned) {
      let gain = inverseSqrt(squares / f32(HEAD_DIM) + params.eps);
      let at = select(0u, HEAD_DIM, head >= HEADS) + r;
      v *= gain * vec4<f32>(head_gamma[at], head_gamma[at + 1u], head_gamma[at + 2u], head_gamma[at + 3u]);
    }
  }
  output_quad(head * HEAD_DIM + r, token, v, output_turns(head * HEAD_DIM + r, token));
  output_end(head * HEAD_DIM, token, index);
}
