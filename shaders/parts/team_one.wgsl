// A team of one invocation: nothing to join. The shape for CPUs, where loads are per lane and a barrier is dear.
// Options: LANES, WORKGROUP, SUBGROUP (for team_subgroups).
var<private> team_index: u32;
fn team_add(value: f32) -> f32 { return value; }
fn team_add4(value: vec4<f32>) -> vec4<f32> { return value; }
fn team_max(value: f32) -> f32 { return value; }
