// What attention on matrix units takes through workgroup memory: rows of f16, and the matrices made of them.
// Options: KEYS, K_MATRICES, V_MATRICES, WORKGROUP, SUBGROUP; parts: problem, row_eights_*, rows_*, adjust_*.
const TEAMS = WORKGROUP / SUBGROUP;
const TILE_ROWS = 16u * TEAMS;
const K_PIECES = 2u * K_MATRICES;                // vectors of eight halves in a row
const V_PIECES = 2u * V_MATRICES;
const K_STRIDE = K_PIECES + 1u;                  // in vectors of eight halves; odd, so that lanes share no bank
const V_STRIDE = V_PIECES + 1u;
const S_STRIDE = KEYS / 4u + 1u;                 // in vectors of four floats

alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right = subgroup_matrix_right<f16, 16, 16>;
alias Sums = subgroup_matrix_result<f32, 16, 16>;

fn halves(v: vec4<f32>) -> vec2<u32> {
  let w = select(v, clamp(v, vec4<f32>(-65504.0), vec4<f32>(65504.0)), abs(v) > vec4<f32>(65504.0));   // NaN stays
  return vec2<u32>(pack2x16float(w.xy), pack2x16float(w.zw));
}
fn query_halves(at: u32, i: u32) -> vec2<u32> {
  if (i >= WIDTH) { return vec2<u32>(); }
  return halves(query_load(at, i) * query_scale());
}
fn v_vector(at: u32, piece: u32, inside: bool) -> vec4<u32> {
  if (!inside) { return vec4<u32>(); }           // beyond the keys there may be NaN, which a probability of 0 does not hide
  return values_eight(at, piece);
}
