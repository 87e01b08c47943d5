// The only split: normalise and store.   Parts: store_* as out, finish, sink_*, lse_*.
fn split_store(b: u32, h: u32, i: u32, split: u32, c: u32, v: vec4<f32>, sum: f32, highest: f32) {
  let factor = finish(b, h, i, highest, sum, c == 0u);
  out_store(b * params.o_batch + h * params.o_head + i * params.o_row, c, select(v * factor, vec4<f32>(), factor <= 0.0));
}
fn split_share(keys: u32) -> u32 { return keys; }
fn split_ahead(number: u32, index: u32) {}
fn split_end(number: u32, index: u32) {}
