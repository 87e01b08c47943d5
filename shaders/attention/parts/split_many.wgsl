// One of several splits: unnormalised, for combine.wgsl.
var<storage, read_write> partial_out: array<vec4<f32>>;   // (tokens, HEADS, splits, HEAD_DIM) f32
var<storage, read_write> partial_stat: array<vec2<f32>>;  // (tokens, HEADS, splits) of (max in log2 units, sum) f32
fn split_store(token: u32, head: u32, split: u32, i: u32, out: vec4<f32>, sum: f32, highest: f32) {
  let at = (token * HEADS + head) * params.splits + split;
  partial_out[at * WIDTH + i] = out;
  if (i == 0u) { partial_stat[at] = vec2<f32>(highest, sum); }
}
