// y[token, row] = residual[token, row] + result.
var<storage, read> residual: array<f32>;         // (tokens, y_stride) f32
var<storage, read_write> y: array<f32>;          // (tokens, y_stride) f32
fn output(row: u32, token: u32, results: array<f32, ROWS>) {
  //@ unroll r in 0..ROWS
  if (row + $ru < params.rows) {
    let i$r = token * params.y_stride + params.first_row + row + $ru;
    y[i$r] = residual[i$r] + results[$r];
  }
  //@ end
}
