// Teams of split.wgsl of one invocation: nothing to join. The shape for CPUs, where loads are per lane and a barrier is dear.
var<private> team_index: u32;
fn team_score(sums: array<f32, 1>) -> f32 { return sums[0]; }
fn team_max(score: f32) -> f32 { return score; }
fn team_total(sum: f32) -> f32 { return sum; }
fn team_from(value: f32, u: u32) -> f32 { return value; }
fn fold_max(value: f32) -> f32 { return value; }
fn fold_add(value: f32) -> f32 { return value; }
fn fold_add4(value: vec4<f32>) -> vec4<f32> { return value; }
