// Teams of one subgroup are merged by its operations.   Options: LANES, SUBGROUP.
const FOLDED = max(LANES, SUBGROUP);             // invocations that end with one result
fn fold_max(value: f32) -> f32 {
  var highest = value;
  for (var distance = LANES; distance < SUBGROUP; distance <<= 1u) { highest = max(highest, subgroupShuffleXor(highest, distance)); }
  return highest;
}
fn fold_add(value: vec4<f32>) -> vec4<f32> {
  var sum = value;
  for (var distance = LANES; distance < SUBGROUP; distance <<= 1u) { sum += subgroupShuffleXor(sum, distance); }
  return sum;
}
