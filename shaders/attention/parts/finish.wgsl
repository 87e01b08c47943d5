// The end of a softmax: let the sink join, write the lse, and give the factor that normalises the outputs.   Parts: sink_*, lse_*.
fn finish(b: u32, h: u32, i: u32, highest: f32, sum: f32, writes_lse: bool) -> f32 {
  let sink = sink_of(h);
  let top = max(highest, sink);
  let own = exp2(highest - top);
  let total = sum * own + select(exp2(sink - top), 0.0, sink <= LOWEST);
  if (writes_lse) { lse_store(b, h, i, top, total); }
  return select(own / total, 0.0, total <= 0.0);
}
