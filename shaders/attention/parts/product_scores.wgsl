// The first product of path "gemm": m are queries, n keys, k channels. Scores in log2 units; tiles that no query sees are left out.
// Parts: problem, matrices, adjust_*.   Holes: b, the type of vectors of B_WIDTH.
var<storage, read_write> scores: array<$b>;      // (planes, rows, columns) f32

const EMPTY_TILES = false;
fn a_plane(z: u32) -> u32 { return z * matrices.depth * matrices.rows; }
fn b_plane(z: u32) -> u32 { return kv_plane(z) * matrices.depth * matrices.columns; }
fn a_stride() -> u32 { return matrices.rows; }
fn b_stride() -> u32 { return matrices.columns; }

fn tile_depths(z: u32, m: u32, n: u32) -> vec2<u32> {
  if (m >= query_count()) { return vec2<u32>(); }
  let b = batch_of(z);
  let sees = n < end_key(b, min(m + MWG, query_count()) - 1u) && n + NWG > first_key(b, m);
  return vec2<u32>(0u, select(0u, matrices.depth, sees));
}

fn tile_store(z: u32, m: u32, n: u32, sums: $b) {
  let b = batch_of(z);
  let h = head_of(z);
  var x = sums * query_scale();
  //@ unroll e in 0..B_WIDTH
  x[$e] = adjust(x[$e], b, h, m, n + $eu);
  //@ end
  scores[((z * matrices.rows + m) * matrices.columns + n) / B_WIDTH] = x;
}
