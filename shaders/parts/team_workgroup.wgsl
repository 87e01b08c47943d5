// A team of any power of two up to the workgroup, through workgroup memory: right whatever the subgroup size. Every lane gets the result.
// Options: LANES, WORKGROUP, SUBGROUP (for team_subgroups).
// Workgroup memory: 16 * WORKGROUP.
var<private> team_index: u32;
var<workgroup> team_values: array<vec4<f32>, WORKGROUP>;
fn team_other(value: vec4<f32>, distance: u32) -> vec4<f32> {
  workgroupBarrier();
  team_values[team_index] = value;
  workgroupBarrier();
  return team_values[team_index ^ distance];
}
fn team_add4(value: vec4<f32>) -> vec4<f32> {
  var sum = value;
  for (var distance = 1u; distance < LANES; distance <<= 1u) { sum += team_other(sum, distance); }
  return sum;
}
fn team_add(value: f32) -> f32 { return team_add4(vec4<f32>(value, 0.0, 0.0, 0.0)).x; }
fn team_max4(value: vec4<f32>) -> vec4<f32> {
  var highest = value;
  for (var distance = 1u; distance < LANES; distance <<= 1u) { highest = max(highest, team_other(highest, distance)); }
  return highest;
}
fn team_max(value: f32) -> f32 {
  var highest = value;
  for (var distance = 1u; distance < LANES; distance <<= 1u) { highest = max(highest, team_other(vec4<f32>(highest), distance).x); }
  return highest;
}
