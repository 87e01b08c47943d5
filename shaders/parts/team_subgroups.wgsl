// A team of several whole subgroups: subgroup operations, then workgroup memory. Every lane gets the result.   Options: LANES, WORKGROUP, SUBGROUP.
// Workgroup memory: 16 * WORKGROUP / SUBGROUP.
var<private> team_index: u32;
var<workgroup> team_values: array<vec4<f32>, WORKGROUP / SUBGROUP>;
fn team_add4(value: vec4<f32>) -> vec4<f32> {
  let sum = subgroupAdd(value);
  workgroupBarrier();
  if (team_index % SUBGROUP == 0u) { team_values[team_index / SUBGROUP] = sum; }
  workgroupBarrier();
  var total = vec4<f32>();
  for (var s = 0u; s < LANES / SUBGROUP; s++) { total += team_values[team_index / LANES * (LANES / SUBGROUP) + s]; }
  return total;
}
fn team_add(value: f32) -> f32 { return team_add4(vec4<f32>(value, 0.0, 0.0, 0.0)).x; }
fn team_max4(value: vec4<f32>) -> vec4<f32> {
  let highest = subgroupMax(value);
  workgroupBarrier();
  if (team_index % SUBGROUP == 0u) { team_values[team_index / SUBGROUP] = highest; }
  workgroupBarrier();
  var top = highest;
  for (var s = 0u; s < LANES / SUBGROUP; s++) { top = max(top, team_values[team_index / LANES * (LANES / SUBGROUP) + s]); }
  return top;
}
fn team_max(value: f32) -> f32 {
  let highest = subgroupMax(value);
  workgroupBarrier();
  if (team_index % SUBGROUP == 0u) { team_values[team_index / SUBGROUP].x = highest; }
  workgroupBarrier();
  var top = highest;
  for (var s = 0u; s < LANES / SUBGROUP; s++) { top = max(top, team_values[team_index / LANES * (LANES / SUBGROUP) + s].x); }
  return top;
}
