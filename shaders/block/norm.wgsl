// y[t] = x[t] * gamma / sqrt(mean(x[t]^2) + eps) over rows with padding: the norm as a dispatch of its own.        reference.rms_norm
// One workgroup a token; its LANES invocations are a team. Columns beyond `columns` of x are 0, and those of y become 0.
// Workgroup memory: that of the team part.   Options: LANES, WORKGROUP = LANES; parts: step, team_*.

struct Params { columns: u32, stride: u32, eps: f32 }

var<uniform> params: Params;
var<storage, read> x: array<vec4<f32>>;          // (tokens, stride) f32, stride a multiple of 16
var<storage, read> gamma: array<vec4<f32>>;      // (stride) f32, 0 beyond columns
var<storage, read_write> y: array<vec4<f32>>;    // (tokens, stride) f32

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  if (group.x >= step.count) { return; }
  team_index = index;
  let width = params.stride / 4u;
  let at = group.x * width;
  var squares = 0.0;
  for (var c = index; c < width; c += LANES) { squares += dot(x[at + c], x[at + c]); }
  let scale = inverseSqrt(team_add(squares) / f32(params.columns) + params.eps);
  for (var c = index; c < width; c += LANES) { y[at + c] = x[at + c] * gamma[c] * scale; }
}
