// Operands of xgemm_batched.wgsl by way of workgroup memory (SA = SB = 1), KSTEP rows of A and B at a time.
// MDIMA invocations bring a row of A's tile and NDIMB one of B's; the others bring the next rows.
// Workgroup memory: 4 * KSTEP * (MWG + NWG).   Options: MDIMA, NDIMB.   Holes: a and b, the types of vectors of A_WIDTH and B_WIDTH.
alias AVector = $a;
alias BVector = $b;
var<storage, read> matrix_a: array<AVector>;     // (planes, k, m) f32
var<storage, read> matrix_b: array<BVector>;     // (planes, k, n) f32

var<workgroup> tile_a: array<$a, KSTEP * MWG / A_WIDTH>;
var<workgroup> tile_b: array<$b, KSTEP * NWG / B_WIDTH>;

fn stage(a_at: u32, b_at: u32, k0: u32, index: u32) {
  workgroupBarrier();                            // the last step's tiles have been read
  for (var k = index / MDIMA; k < KSTEP; k += WORKGROUP / MDIMA) {
    for (var m = index % MDIMA; m < MWG / A_WIDTH; m += MDIMA) {
      tile_a[k * (MWG / A_WIDTH) + m] = matrix_a[(a_at + (k0 + k) * a_stride()) / A_WIDTH + m];
    }
  }
  for (var k = index / NDIMB; k < KSTEP; k += WORKGROUP / NDIMB) {
    for (var n = index % NDIMB; n < NWG / B_WIDTH; n += NDIMB) {
      tile_b[k * (NWG / B_WIDTH) + n] = matrix_b[(b_at + (k0 + k) * b_stride()) / B_WIDTH + n];
    }
  }
  workgroupBarrier();
}
fn a_load(a_at: u32, k0: u32, k: u32, m: u32) -> AVector { return tile_a[(k * MWG + m) / A_WIDTH]; }
fn b_load(b_at: u32, k0: u32, k: u32, n: u32) -> BVector { return tile_b[(k * NWG + n) / B_WIDTH]; }
