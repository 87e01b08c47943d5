// The only split: divide and store.
var<storage, read_write> y: array<vec4<f32>>;    // (tokens, HEADS, HEAD_DIM) f32
fn split_store(token: u32, head: u32, split: u32, i: u32, out: vec4<f32>, sum: f32, highest: f32) {
  y[(token * HEADS + head) * WIDTH + i] = select(vec4<f32>(), out / sum, sum > 0.0);
}
