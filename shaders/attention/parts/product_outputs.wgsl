// The second product of path "gemm": m are channels, n queries, k keys. Runs over the keys that any query of the tile sees.
// Parts: problem, matrices.   Holes: b, the type of vectors of B_WIDTH.
var<storage, read_write> outputs_t: array<$b>;   // (planes, channels, rows) f32

const EMPTY_TILES = true;                        // queries that see nothing give zeros
fn a_plane(z: u32) -> u32 { return kv_plane(z) * matrices.columns * matrices.channels; }
fn b_plane(z: u32) -> u32 { return z * matrices.columns * matrices.rows; }
fn a_stride() -> u32 { return matrices.channels; }
fn b_stride() -> u32 { return matrices.rows; }

fn tile_depths(z: u32, m: u32, n: u32) -> vec2<u32> {
  if (n >= query_count()) { return vec2<u32>(); }
  let b = batch_of(z);
  return vec2<u32>(first_key(b, n) / KSTEP * KSTEP, end_key(b, min(n + NWG, query_count()) - 1u));
}

fn tile_store(z: u32, m: u32, n: u32, sums: $b) { outputs_t[((z * matrices.channels + m) * matrices.rows + n) / B_WIDTH] = sums; }
