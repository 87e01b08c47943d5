// y[token, row] = residual[token, row] + result.
var<storage, read> residual: array<f32>;         // (tokens, y_stride) f32
var<storage, read_write> y: array<f32>;          // (tokens, y_stride) f32
fn output_load(row: u32, token: u32) -> array<f32, ROWS> {
  var loaded: array<f32, ROWS>;
  //@ unroll r in 0..ROWS
  if (row + $ru < params.rows) { loaded[$r] = residual[token * params.y_stride + params.first_row + row + $ru]; }
  //@ end
  return loaded;
}
fn output(row: u32, token: u32, results: array<f32, ROWS>, loaded: array<f32, ROWS>) {
  //@ unroll r in 0..ROWS
  if (row + $ru < params.rows) { y[token * params.y_stride + params.first_row + row + $ru] = loaded[$r] + results[$r]; }
  //@ end
}
