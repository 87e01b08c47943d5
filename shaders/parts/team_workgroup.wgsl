// A team of any power of two up to the workgroup, through workgroup memory: right whatever the subgroup size. Every lane gets the sum.
// Workgroup memory: 4 * WORKGROUP.
var<private> team_index: u32;
var<workgroup> team_values: array<f32, WORKGROUP>;
fn team_add(value: f32) -> f32 {
  var sum = value;
  for (var distance = 1u; distance < LANES; distance <<= 1u) {
    workgroupBarrier();
    team_values[team_index] = sum;
    workgroupBarrier();
    sum += team_values[team_index ^ distance];
  }
  return sum;
}
