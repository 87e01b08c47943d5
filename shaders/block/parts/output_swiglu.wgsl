// y[token, j] = silu(gate_j) * up_j, with rows 2j and 2j + 1 of W being gate_j and up_j.        reference.swiglu
var<storage, read_write> y: array<f32>;          // (tokens, y_stride) f32
fn output_load(row: u32, token: u32) -> array<f32, ROWS> { return array<f32, ROWS>(); }
fn output(row: u32, token: u32, results: array<f32, ROWS>, loaded: array<f32, ROWS>) {
  //@ unroll r in 0..PAIRS
  if (row + 2u * $ru < params.rows) {
    let gate = results[2u * $ru];
    y[token * params.y_stride + (params.first_row + row) / 2u + $ru] = gate / (1.0 + exp(-gate)) * results[2u * $ru + 1u];
  }
  //@ end
}
