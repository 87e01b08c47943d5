// y[token, row] = result.
var<storage, read_write> y: array<f32>;          // (tokens, y_stride) f32
fn output_load(row: u32, token: u32) -> array<f32, ROWS> { return array<f32, ROWS>(); }
fn output(row: u32, token: u32, results: array<f32, ROWS>, loaded: array<f32, ROWS>) {
  //@ unroll r in 0..ROWS
  if (row + $ru < params.rows) { y[token * params.y_stride + params.first_row + row + $ru] = results[$r]; }
  //@ end
}
