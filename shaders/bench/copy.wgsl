// copied = source: as many bytes a second as a kernel can move.        numpy.copyto
// One workgroup copies WORKGROUP * EACH vec4s; an invocation copies every WORKGROUP-th of them, or with RUNS = 1 a run of EACH.
// Workgroup memory: none.
// Options: WORKGROUP, EACH, RUNS.

struct Params { count: u32 }

var<uniform> params: Params;
var<storage, read> source: array<vec4<u32>>;       // (count) u32 x 4
var<storage, read_write> copied: array<vec4<u32>>; // (count) u32 x 4

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let first = (group.x + group.y * groups.x) * WORKGROUP * EACH + select(index, index * EACH, RUNS == 1u);
  //@ unroll i in 0..EACH
  let at$i = min(first + $iu * select(WORKGROUP, 1u, RUNS == 1u), params.count - 1u);
  let word$i = source[at$i];
  //@ end
  //@ unroll i in 0..EACH
  copied[at$i] = word$i;
  //@ end
}
