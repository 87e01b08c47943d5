// Operands of xgemm_batched.wgsl straight from memory (SA = SB = 0).   Holes: a and b, the types of vectors of A_WIDTH and B_WIDTH.
alias AVector = $a;
alias BVector = $b;
var<storage, read> matrix_a: array<AVector>;     // (planes, k, m) f32
var<storage, read> matrix_b: array<BVector>;     // (planes, k, n) f32

fn stage(a_at: u32, b_at: u32, k0: u32, index: u32) {}
fn a_load(a_at: u32, k0: u32, k: u32, m: u32) -> AVector { return matrix_a[(a_at + (k0 + k) * a_stride() + m) / A_WIDTH]; }
fn b_load(b_at: u32, k0: u32, k: u32, n: u32) -> BVector { return matrix_b[(b_at + (k0 + k) * b_stride() + n) / B_WIDTH]; }
