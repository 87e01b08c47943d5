// Attention sinks: a logit a head that joins the softmax's sum only.
var<storage, read> sinks: array<f32>;            // (heads)
fn sink_of(h: u32) -> f32 { return sinks[h] * LOG2E; }
