// h[t] = row token[t] of the embedding matrix, dequantised.        reference.embed
// One workgroup a token; each invocation takes chunks of 16 columns. A matrix in pieces: each piece writes the tokens it holds.
// Workgroup memory: none.   Options: WORKGROUP; parts: step, weights_* or codes_*, and scales_*.

struct Params { columns: u32, rows: u32, y_stride: u32, first_row: u32 }

var<uniform> params: Params;
var<storage, read> tokens: array<u32>;           // (chunk)
var<storage, read_write> y: array<vec4<f32>>;    // (tokens, y_stride) f32

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let token = group.x;
  if (token >= step.count) { return; }
  let row = tokens[token] - params.first_row;    // wraps to a large number below first_row
  if (row >= params.rows) { return; }
  for (var chunk = index; chunk < (params.columns + 15u) / 16u; chunk += WORKGROUP) {
    let code = codes_floats(codes_load(row, chunk));
    let affine = scales_affine(scales_load(row, chunk), row, chunk);
    //@ unroll i in 0..4
    y[token * (params.y_stride / 4u) + chunk * 4u + $iu] = fma(vec4<f32>(affine.x), code[$i], vec4<f32>(affine.y));
    //@ end
  }
}
