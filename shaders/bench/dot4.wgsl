// x = dot4I8Packed(x, weights) + x, over and over, in 16 independent integers an invocation: as many int8 products a second as there are.
// What a step adds depends on the step before, so nothing can be left out.
// One workgroup: WORKGROUP invocations, each `rounds` rounds of 4 * 16 products of four; invocation i begins at seeds[i % 32].
// Workgroup memory: none.
// Options: WORKGROUP.

struct Params { rounds: u32 }

var<uniform> params: Params;
var<storage, read> seeds: array<vec2<u32>>;            // (32) of (first x, weights: four int8) u32
var<storage, read_write> totals: array<u32>;           // (workgroups * WORKGROUP) u32, modulo 2^32

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let place = group.x * WORKGROUP + index;
  let seed = seeds[place % 32u];
  let weights = seed.y;
  //@ unroll c in 0..16
  var x$c = seed.x + $cu * 0x01030507u;
  //@ end
  for (var i = 0u; i < params.rounds; i++) {
    //@ unroll u in 0..4
    //@ unroll c in 0..16
    x$c = bitcast<u32>(dot4I8Packed(x$c, weights)) + x$c;
    //@ end
    //@ end
  }
  var total = 0u;
  //@ unroll c in 0..16
  total += x$c;
  //@ end
  totals[place] = total;
}
