// The only split: the normalised outputs of the workgroup's heads go on into a projection.
// Parts: finish, sink_*, lse_*; slice, weights_* or codes_* and scales_*, products_*, bias_*, all as slice.
fn split_store(b: u32, h: u32, i: u32, split: u32, c: u32, v: vec4<f32>, sum: f32, highest: f32) {
  let factor = finish(b, h, i, highest, sum, c == 0u);
  let out = select(v * factor, vec4<f32>(), factor <= 0.0);
  //@ unroll n in 0..4
  slice_values[h % GROUP * VALUE_DIM + c * 4u + $nu] = out[$n];
  //@ end
}
fn split_share(keys: u32) -> u32 { return keys; }
fn split_ahead(number: u32, index: u32) { slice_fetch(number, 0u, index); }
fn split_end(number: u32, index: u32) { slice_project(number, index); }
