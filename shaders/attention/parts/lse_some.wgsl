// The natural log of each row's sum of exponentials; -inf, by its bits, for a row that sees nothing.
var<storage, read_write> lse: array<u32>;        // (batch, heads, queries) f32
fn lse_store(b: u32, h: u32, i: u32, highest: f32, sum: f32) {
  let value = (highest + log2(max(sum, 1e-38))) / LOG2E;
  lse[(b * params.heads + h) * params.queries + i] = select(select(bitcast<u32>(value), bitcast<u32>(sum), !(sum == sum)), 0xff800000u, sum <= 0.0);
}
