// A product of matrices for each plane: C[m, n] = sum over k of A[k, m] * B[k, n]; rows of A and B lie over k, those of C over m.
// One workgroup computes a tile of MWG x NWG; each of its MDIMC x NDIMC invocations MWG / MDIMC x NWG / NDIMC of it, in registers.
// An invocation's rows are one run (STRM = 0) or vectors of VWM, MDIMC vectors apart (STRM = 1); its columns likewise with STRN and VWN.
// The parameters are those of CLBlast (Nugteren 2018).
// Workgroup memory: that of the gemm_* part.
// Options: MWG, NWG, MDIMC, NDIMC, STRM, STRN, VWM, VWN, WORKGROUP = MDIMC * NDIMC, KSTEP and UNROLL (rows of A and B between stagings and
// loop tests), A_WIDTH and B_WIDTH = min(VWM or VWN, 4), A_LOADS and B_LOADS (vectors of that width an invocation);
// parts: gemm_* with the types of vectors, product_*.

const MWI = MWG / MDIMC;
const NWI = NWG / NDIMC;

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let z = group.z;
  let m = group.x * MWG;
  let n = group.y * NWG;
  let depths = tile_depths(z, m, n);             // rows of A and B that matter, in steps of KSTEP
  if (!EMPTY_TILES && depths.x >= depths.y) { return; }
  let x = index % MDIMC;
  let y = index / MDIMC;
  let a_at = a_plane(z) + m;                     // of the tile's first column in row 0
  let b_at = b_plane(z) + n;
  //@ unroll i in 0..A_LOADS
  let m$i = select(x * MWI + $iu * A_WIDTH, x * VWM + ($iu * A_WIDTH) % VWM + ($iu * A_WIDTH) / VWM * (VWM * MDIMC), STRM == 1u);
  //@ unroll j in 0..B_LOADS
  //@ unroll e in 0..A_WIDTH
  var c$i_$e_$j = BVector();
  //@ end
  //@ end
  //@ end
  //@ unroll j in 0..B_LOADS
  let n$j = select(y * NWI + $ju * B_WIDTH, y * VWN + ($ju * B_WIDTH) % VWN + ($ju * B_WIDTH) / VWN * (VWN * NDIMC), STRN == 1u);
  //@ end
  for (var k0 = depths.x; k0 < depths.y; k0 += KSTEP) {
    stage(a_at, b_at, k0, index);
    for (var k = 0u; k < KSTEP; k += UNROLL) {
      //@ unroll u in 0..UNROLL
      {
        //@ unroll i in 0..A_LOADS
        let a$i = a_load(a_at, k0, k + $uu, m$i);
        //@ end
        //@ unroll j in 0..B_LOADS
        let b$j = b_load(b_at, k0, k + $uu, n$j);
        //@ end
        //@ unroll i in 0..A_LOADS
        //@ unroll e in 0..A_WIDTH
        //@ unroll j in 0..B_LOADS
        c$i_$e_$j = fma(BVector(a$i[$e]), b$j, c$i_$e_$j);
        //@ end
        //@ end
        //@ end
      }
      //@ end
    }
  }
  //@ unroll i in 0..A_LOADS
  //@ unroll e in 0..A_WIDTH
  //@ unroll j in 0..B_LOADS
  tile_store(z, m + m$i + $eu, n + n$j, c$i_$e_$j);
  //@ end
  //@ end
  //@ end
}
