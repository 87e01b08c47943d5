// sums += left . right, over and over, in 8 independent matrices a subgroup: as many products a second as matrix units reach.      numpy.matmul
// Factors are small whole numbers in f16 and sums are f32, so that results are exact counts of what was done.
// A workgroup has WORKGROUP / SUBGROUP subgroups, each with `rounds` rounds of 2 * 8 products of 16 x 16 x 16.
// Workgroup memory: none.
// Options: WORKGROUP, SUBGROUP.

struct Params { rounds: u32 }

alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right = subgroup_matrix_right<f16, 16, 16>;
alias Sums = subgroup_matrix_result<f32, 16, 16>;

var<uniform> params: Params;
var<storage, read> factors: array<f16>;                // (4, 16, 16) f16: two left, two right
var<storage, read_write> sums: array<f32>;             // (workgroups * WORKGROUP / SUBGROUP, 2, 2, 2, 16, 16) f32

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let team = group.x * (WORKGROUP / SUBGROUP) + index / SUBGROUP;
  //@ unroll n in 0..2
  let left$n = subgroupMatrixLoad<Left, row_major>(&factors, $nu * 256u, 16u);
  let right$n = subgroupMatrixLoad<Right, row_major>(&factors, 512u + $nu * 256u, 16u);
  //@ end
  //@ unroll t in 0..2
  //@ unroll i in 0..2
  //@ unroll j in 0..2
  var sum$t_$i_$j: Sums;
  //@ end
  //@ end
  //@ end
  for (var round = 0u; round < params.rounds; round++) {
    //@ unroll u in 0..2
    //@ unroll t in 0..2
    //@ unroll i in 0..2
    //@ unroll j in 0..2
    sum$t_$i_$j = subgroupMatrixMultiplyAccumulate(left$i, right$j, sum$t_$i_$j);
    //@ end
    //@ end
    //@ end
    //@ end
  }
  //@ unroll t in 0..2
  //@ unroll i in 0..2
  //@ unroll j in 0..2
  subgroupMatrixStore<row_major>(&sums, (team * 8u + $tu * 4u + $iu * 2u + $ju) * 256u, sum$t_$i_$j, 16u);
  //@ end
  //@ end
  //@ end
}
