// Attention over two disjoint sets of keys from the attention over each.                                     reference.merge_state
// Each invocation merges four channels of one row.   Workgroup memory: none.
// Options: VALUE_DIM, WORKGROUP; parts: rows_* as a and b, store_* as out.

struct Params { rows: u32 }

var<uniform> params: Params;
var<storage, read> lse_a: array<u32>;            // (rows) f32, -inf for an empty set: read as bits, infinities are not portable
var<storage, read> lse_b: array<u32>;            // (rows) f32
var<storage, read_write> lse: array<u32>;        // (rows) f32

const VALUE_WIDTH = (VALUE_DIM + 3u) / 4u;
const EMPTY = 0xff800000u;

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let i = (group.x + group.y * groups.x) * WORKGROUP + index;
  let row = i / VALUE_WIDTH;
  let c = i % VALUE_WIDTH;
  if (row >= params.rows) { return; }
  let bits_a = lse_a[row];
  let bits_b = lse_b[row];
  let some_a = bits_a != EMPTY;
  let some_b = bits_b != EMPTY;
  let log_a = select(-3.0e38, bitcast<f32>(bits_a), some_a);
  let log_b = select(-3.0e38, bitcast<f32>(bits_b), some_b);
  let top = max(log_a, log_b);
  let weight_a = select(0.0, exp(log_a - top), some_a);
  let weight_b = select(0.0, exp(log_b - top), some_b);
  let total = weight_a + weight_b;
  let v = select((weight_a * a_load(row * VALUE_DIM, c) + weight_b * b_load(row * VALUE_DIM, c)) / total, vec4<f32>(), total <= 0.0);
  out_store(row * VALUE_DIM, c, v);
  let sum = select(top + log(max(total, 1.0e-38)), total, !(total == total));
  if (c == 0u) { lse[row] = select(bitcast<u32>(sum), EMPTY, total <= 0.0); }
}
