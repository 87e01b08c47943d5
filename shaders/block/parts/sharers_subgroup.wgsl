// Lanes of one subgroup add up what they have of a row. Lane 0 of the sharers gets the sum.   Options: LANES, SUBGROUP.
fn sharers_add(value: f32) -> f32 {
  if (LANES >= SUBGROUP) { return subgroupAdd(value); }
  var sum = value;
  for (var distance = 1u; distance < LANES; distance <<= 1u) { sum += subgroupShuffleXor(sum, distance); }
  return sum;
}
fn neighbours_add(value: f32) -> f32 { return subgroupAdd(value); }
