// Each plane transposed: probabilities_t[c, r] = scores[r, c], so that the product over keys runs over rows.
// Each invocation moves 4 x 4. One workgroup: 32 x 32 of one plane.
// Workgroup memory: none.   Options: HEAD_DIM, VALUE_DIM; parts: problem, lengths_*, matrices.

var<storage, read> scores: array<vec4<f32>>;     // (planes, rows, columns) f32, by now probabilities
var<storage, read_write> probabilities_t: array<vec4<f32>>;   // (planes, columns, rows) f32

@compute @workgroup_size(8, 8)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  let c = id.x * 4u;
  let r = id.y * 4u;
  if (c >= matrices.columns || r >= matrices.rows) { return; }
  //@ unroll i in 0..4
  let p$i = scores[((id.z * matrices.rows + r + $iu) * matrices.columns + c) / 4u];
  //@ end
  //@ unroll e in 0..4
  probabilities_t[((id.z * matrices.columns + c + $eu) * matrices.rows + r) / 4u] = vec4<f32>(p0[$e], p1[$e], p2[$e], p3[$e]);
  //@ end
}
