// silu(gate_j) * up_j of the workgroup's rows, 2j and 2j + 1 of W being gate_j and up_j, goes on into the next projection.        reference.swiglu
// Parts: slice, weights_* or codes_* and scales_*, products_*, bias_*, all as slice.
fn output_load(row: u32, token: u32) -> array<f32, ROWS> { return array<f32, ROWS>(); }
fn output(row: u32, token: u32, results: array<f32, ROWS>, loaded: array<f32, ROWS>) {
  //@ unroll r in 0..PAIRS
  {
    let gate = results[2u * $ru];
    slice_values[row % GROUP_ROWS / 2u + $ru] = gate / (1.0 + exp(-gate)) * results[2u * $ru + 1u];
  }
  //@ end
}
fn output_ahead(first_row: u32, index: u32) { slice_fetch(first_row / GROUP_ROWS, 0u, index); }
fn output_end(first_row: u32, token: u32, index: u32) { slice_project(first_row / GROUP_ROWS, index); }
