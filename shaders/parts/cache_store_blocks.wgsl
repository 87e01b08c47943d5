// The quantised KV cache, for writing: a head of K or V waits in workgroup memory until all of it is there, since 32 channels share a scale.
// A workgroup computes one head.   Workgroup memory: 4 * HEAD_DIM.
// Options: HEADS, KV_HEADS, HEAD_DIM, WORKGROUP; parts: kv_append_blocks as keys and as values (scales: cache_scales()), kv_encode, kv_encode_*.
var<workgroup> head_values: array<vec2<f32>, HEAD_DIM / 2u>;
fn cache_row(head: u32, position: u32) -> u32 { return 0u; }
fn keys_store(i: u32, v: vec2<f32>) { head_values[i] = v; }
fn values_store(i: u32, v: vec2<f32>) { head_values[i] = v; }
fn new_keys_load(at: u32, i: u32) -> vec4<f32> { return vec4<f32>(head_values[2u * i], head_values[2u * i + 1u]); }
fn new_values_load(at: u32, i: u32) -> vec4<f32> { return vec4<f32>(head_values[2u * i], head_values[2u * i + 1u]); }

fn cache_rows() -> u32 { return arrayLength(&keys) / (keys_BLOCKS * KV_BITS + (keys_BLOCKS + 1u) / 2u); }
fn cache_scales() -> u32 { return cache_rows() * keys_BLOCKS * KV_BITS; }
fn output_ahead(first_row: u32, index: u32) {}
fn output_end(first_row: u32, token: u32, index: u32) {
  workgroupBarrier();
  let head = (params.first_row + first_row) / HEAD_DIM;
  if (head >= HEADS) {
    let place = (head - HEADS) % KV_HEADS * (cache_rows() / KV_HEADS) + step.position + token;
    for (var c = index; c < keys_UNITS; c += WORKGROUP) {
      if (head < HEADS + KV_HEADS) { keys_append(place, 0u, c); } else { values_append(place, 0u, c); }
    }
  }
  workgroupBarrier();                            // before the next token's values
}
