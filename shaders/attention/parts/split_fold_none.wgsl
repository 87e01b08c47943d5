// Each team has its own result.   Options: LANES.
const FOLDED = LANES;
fn fold_max(value: f32) -> f32 { return value; }
fn fold_add(value: vec4<f32>) -> vec4<f32> { return value; }
