// Scores are only scaled; the factor for log2 units goes into the query. What overflows stays above LOWEST and finite.
fn query_scale() -> f32 { return params.scale * LOG2E; }
fn adjust(score: f32, b: u32, h: u32, i: u32, j: u32) -> f32 { return saturated(score, 3.3e38); }
