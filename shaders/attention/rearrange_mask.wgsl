// The masks of a round, padded, in f32: what is added to a score, LOWEST where the key is hidden, 0 in the padding.
// Each invocation writes 4 keys of one query. One workgroup: 8 queries x 32 keys.
// Workgroup memory: none.
// Options: HEAD_DIM, VALUE_DIM; parts: problem, lengths_*, matrices, mask_*.

var<storage, read_write> padded_mask: array<vec4<f32>>;   // (mask planes, rows, columns) f32

@compute @workgroup_size(8, 8)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let j = id.x * 4u;
  let i = id.y;
  if (id.z >= matrices.mask_planes || i >= matrices.rows || j >= matrices.columns) { return; }
  let plane = (matrices.first / matrices.mask_share + id.z) * matrices.mask_share;   // the first plane that has this mask
  var m = vec4<f32>();
  //@ unroll k in 0..4
  if (i < params.queries && j + $ku < params.keys) { m[$k] = mask_at(plane / params.heads, plane % params.heads, i, j + $ku); }
  //@ end
  padded_mask[((id.z * matrices.rows + i) * matrices.columns + j) / 4u] = m;
}
