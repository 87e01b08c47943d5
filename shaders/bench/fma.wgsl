// x = x * factor + step, over and over, in 8 independent vec4s an invocation: as many multiplications and additions a second as there are.
// The factor is 1, which only the host knows, so nothing can be left out, and the sum of all x is an exact count of what was done.
// One workgroup: WORKGROUP invocations, each `rounds` rounds of 4 * 8 * 4 fused multiply-adds; invocation i begins at seeds[i % 32].
// Workgroup memory: none.
// Options: SCALAR (f32 or f16, exact up to 2048), FUSED (by the function fma, or by * and +, which compilers fuse as they like), WORKGROUP.

struct Params { rounds: u32 }

var<uniform> params: Params;
var<storage, read> seeds: array<vec4<f32>>;            // (32) of (first x, factor, step, step of every second round) f32
var<storage, read_write> totals: array<f32>;           // (workgroups * WORKGROUP) f32

override WORKGROUP: u32 = 64;

fn next(x: vec4<SCALAR>, factor: vec4<SCALAR>, step: vec4<SCALAR>) -> vec4<SCALAR> {
  if (FUSED) { return fma(x, factor, step); }
  return x * factor + step;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let place = group.x * WORKGROUP + index;
  let seed = vec4<SCALAR>(seeds[place % 32u]);
  let factor = vec4<SCALAR>(seed.y);
  let up = vec4<SCALAR>(seed.z);
  let down = vec4<SCALAR>(seed.w);
  //@ unroll c in 0..8
  var x$c = vec4<SCALAR>(seed.x) + vec4<SCALAR>(0.0, 1.0, 2.0, 3.0);
  //@ end
  for (var i = 0u; i < params.rounds; i++) {
    //@ unroll u in 0..2
    //@ unroll c in 0..8
    x$c = next(x$c, factor, up);
    //@ end
    //@ unroll c in 0..8
    x$c = next(x$c, factor, down);
    //@ end
    //@ end
  }
  var total = 0.0;
  //@ unroll c in 0..8
  total += dot(vec4<f32>(x$c), vec4<f32>(1.0));
  //@ end
  totals[place] = total;
}
