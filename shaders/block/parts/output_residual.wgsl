// y[token, row] = residual[token, row] + result.   Options: RESIDUAL_STRIDE.
var<storage, read> residual: array<f32>;         // (tokens, RESIDUAL_STRIDE) f32
var<storage, read_write> y: array<f32>;          // (tokens, y_stride) f32
fn output(row: u32, token: u32, results: array<f32, ROWS>) {
  //@ unroll r in 0..ROWS
  if (row + $ru < params.rows) {
    let i$r = params.first_row + row + $ru;
    y[token * params.y_stride + i$r] = residual[token * RESIDUAL_STRIDE + i$r] + results[$r];
  }
  //@ end
}
