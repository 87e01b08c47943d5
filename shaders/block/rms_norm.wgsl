// y = x * weight / sqrt(mean(x^2) + eps), row by row; a row of zeros stays zero even where eps is 0.          reference.rms_norm
// A team of LANES invocations takes one row, each of them every LANES-th vec4; sums are f32 whatever the storage.
// Workgroup memory: that of the team part.
// Options: ROW (channels), LANES, WORKGROUP; parts: rows_* as x and weight, store_* as out, team_*.

struct Params { rows: u32, eps: f32 }

var<uniform> params: Params;

const ROW_WIDTH = (ROW + 3u) / 4u;

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  team_index = index;
  let lane = index % LANES;
  let row = (group.x + group.y * groups.x) * (WORKGROUP / LANES) + index / LANES;   // linear: there may be more than 65,535 groups
  let at = min(row, params.rows - 1u) * ROW;     // all stay to the end: teams may meet at barriers
  var squares = vec4<f32>();
  for (var c = lane; c < ROW_WIDTH; c += LANES) {
    let v = x_load(at, c);
    squares = fma(v, v, squares);
  }
  let mean = team_add(dot(squares, vec4<f32>(1.0))) / f32(ROW) + params.eps;
  let factor = inverseSqrt(select(mean, 1.2e-38, mean < 1.2e-38));
  if (row < params.rows) {
    for (var c = lane; c < ROW_WIDTH; c += LANES) { out_store(at, c, x_load(at, c) * factor * weight_load(0u, c)); }
  }
}
