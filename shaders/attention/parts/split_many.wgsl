// One of several splits: unnormalised, for combine.wgsl.
var<storage, read_write> partial_out: array<vec4<f32>>;   // (batch, queries, heads, splits, VALUE_WIDTH) f32
var<storage, read_write> partial_stat: array<vec2<f32>>;  // (batch, queries, heads, splits) of (max in log2 units, sum) f32
fn split_store(b: u32, h: u32, i: u32, split: u32, c: u32, v: vec4<f32>, sum: f32, highest: f32) {
  let at = ((b * params.queries + i) * params.heads + h) * params.splits + split;
  partial_out[at * VALUE_WIDTH + c] = v;
  if (c == 0u) { partial_stat[at] = vec2<f32>(highest, sum); }
}
fn split_share(keys: u32) -> u32 { return (keys + params.splits - 1u) / params.splits; }
fn split_ahead(number: u32, index: u32) {}
fn split_end(number: u32, index: u32) {}
