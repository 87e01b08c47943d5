// Outputs from padded, transposed matrices to where the call wants them.
// Each invocation moves 4 queries x 4 channels. One workgroup: 32 x 32 of one plane.
// Workgroup memory: none.   Options: HEAD_DIM, VALUE_DIM; parts: problem, lengths_*, matrices, store_* as out.

var<storage, read> outputs_t: array<vec4<f32>>;  // (planes, channels, rows) f32

@compute @workgroup_size(8, 8)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let i = id.x * 4u;
  let c = id.y * 4u;
  if (i >= query_count() || id.y >= VALUE_WIDTH) { return; }
  //@ unroll e in 0..4
  let o$e = outputs_t[((id.z * matrices.channels + c + $eu) * matrices.rows + i) / 4u];
  //@ end
  let at = batch_of(id.z) * params.o_batch + head_of(id.z) * params.o_head;
  //@ unroll r in 0..4
  if (i + $ru < query_count()) { out_store(at + (i + $ru) * params.o_row, id.y, vec4<f32>(o0[$r], o1[$r], o2[$r], o3[$r])); }
  //@ end
}
