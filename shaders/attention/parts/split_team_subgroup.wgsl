// Teams of split.wgsl within a subgroup. KEYS sums over LANES lanes are not taken one by one: each step halves what a lane still has of keys while
// it adds what another lane has of the rest, so that lane l ends with the sum of key l % KEYS.   Options: LANES, KEYS, FOLDED.
// Distances are unrolled in the text, so that those beyond a team fold away.
var<private> team_index: u32;
fn team_half(low: f32, high: f32, distance: u32) -> f32 {   // of the lane's half, what it and its partner have
  let upper = (team_index & distance) != 0u;
  return select(low, high, upper) + subgroupShuffleXor(select(high, low, upper), distance);
}
fn team_score(sums: array<f32, KEYS>) -> f32 {
  var x0 = sums[0];
  var x1 = sums[min(1u, KEYS - 1u)];
  if (KEYS > 2u) {
    var x2 = sums[min(2u, KEYS - 1u)];
    var x3 = sums[min(3u, KEYS - 1u)];
    if (KEYS > 4u) {
      x0 = team_half(x0, sums[min(4u, KEYS - 1u)], 4u);
      x1 = team_half(x1, sums[min(5u, KEYS - 1u)], 4u);
      x2 = team_half(x2, sums[min(6u, KEYS - 1u)], 4u);
      x3 = team_half(x3, sums[min(7u, KEYS - 1u)], 4u);
    }
    x0 = team_half(x0, x2, 2u);
    x1 = team_half(x1, x3, 2u);
  }
  if (KEYS > 1u) { x0 = team_half(x0, x1, 1u); }
  //@ unroll d in 0..7
  if ((1u << $du) >= KEYS && (1u << $du) < LANES) { x0 += subgroupShuffleXor(x0, 1u << $du); }
  //@ end
  return x0;
}
fn team_max(score: f32) -> f32 {                 // over the keys
  var x = score;
  //@ unroll d in 0..3
  if ((1u << $du) < KEYS) { x = max(x, subgroupShuffleXor(x, 1u << $du)); }
  //@ end
  return x;
}
fn team_total(sum: f32) -> f32 {
  var x = sum;
  //@ unroll d in 0..3
  if ((1u << $du) < KEYS) { x += subgroupShuffleXor(x, 1u << $du); }
  //@ end
  return x;
}
fn team_from(value: f32, u: u32) -> f32 {        // what the team's lane of key u has
  if (KEYS == 1u) { return value; }
  return subgroupShuffle(value, team_index % FOLDED / LANES * LANES + u);
}

// Teams of one subgroup are merged.
fn fold_max(value: f32) -> f32 {
  var x = value;
  //@ unroll d in 0..7
  if ((1u << $du) >= LANES && (1u << $du) < FOLDED) { x = max(x, subgroupShuffleXor(x, 1u << $du)); }
  //@ end
  return x;
}
fn fold_add(value: f32) -> f32 {
  var x = value;
  //@ unroll d in 0..7
  if ((1u << $du) >= LANES && (1u << $du) < FOLDED) { x += subgroupShuffleXor(x, 1u << $du); }
  //@ end
  return x;
}
fn fold_add4(value: vec4<f32>) -> vec4<f32> {
  var x = value;
  //@ unroll d in 0..7
  if ((1u << $du) >= LANES && (1u << $du) < FOLDED) { x += subgroupShuffleXor(x, 1u << $du); }
  //@ end
  return x;
}
