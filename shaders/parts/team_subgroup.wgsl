// A team within one subgroup: LANES is a power of two, at most the subgroup's size. Every lane gets the result.
// Options: LANES, WORKGROUP, SUBGROUP.
var<private> team_index: u32;
fn team_add(value: f32) -> f32 {
  var sum = value;
  for (var distance = 1u; distance < LANES; distance <<= 1u) { sum += subgroupShuffleXor(sum, distance); }
  return sum;
}
fn team_add4(value: vec4<f32>) -> vec4<f32> {
  var sum = value;
  for (var distance = 1u; distance < LANES; distance <<= 1u) { sum += subgroupShuffleXor(sum, distance); }
  return sum;
}
fn team_max4(value: vec4<f32>) -> vec4<f32> {
  var highest = value;
  for (var distance = 1u; distance < LANES; distance <<= 1u) { highest = max(highest, subgroupShuffleXor(highest, distance)); }
  return highest;
}
fn team_max(value: f32) -> f32 {
  var highest = value;
  for (var distance = 1u; distance < LANES; distance <<= 1u) { highest = max(highest, subgroupShuffleXor(highest, distance)); }
  return highest;
}
