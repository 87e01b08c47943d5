// x as f16 for matrix units, each token scaled so that its largest value is TOP: half = round(norm(x) / scale).        reference.rms_norm
// One workgroup a token; its LANES invocations are a team. A scale for each token keeps what is large from overflowing and what is small from
// vanishing, whatever the model. Columns of each four are written as 0, 2, 1, 3, the order in which codes of weights are unpacked.
// Workgroup memory: that of the team part.   Options: LANES, WORKGROUP = LANES; parts: step, norm_rms or norm_none, token_*, team_*.

struct Params { columns: u32, x_stride: u32, half_stride: u32, eps: f32 }

const TOP = 1024.0;

var<uniform> params: Params;
var<storage, read> x: array<vec4<f32>>;          // (tokens, x_stride) f32, x_stride a multiple of 16; columns beyond `columns` are 0
var<storage, read_write> half: array<vec4<u32>>; // (tokens, half_stride) f16, half_stride a multiple of 64; columns beyond `columns` become 0
var<storage, read_write> scale: array<f32>;      // (tokens) f32

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  if (group.x >= step.count) { return; }
  team_index = index;
  let width = params.x_stride / 4u;
  let at = input_token(group.x) * width;
  var squares = 0.0;
  var high = 0.0;
  for (var c = index; c < width; c += LANES) {
    let v = x[at + c];
    let n = abs(norm_apply4(v, c));
    squares += norm_square(v);
    high = max(high, max(max(n.x, n.y), max(n.z, n.w)));
  }
  let highest = team_max(high);
  let factor = select(0.0, TOP / highest, highest > 1e-30);       // what is smaller counts as zero: TOP / highest would overflow
  let norm = norm_scale(squares);
  if (index == 0u) { scale[group.x] = norm * highest / TOP; }
  for (var p = index; p < params.half_stride / 8u; p += LANES) {
    let inside = 2u * p < width;                                    // whole pairs: x_stride is a multiple of 16
    let a = norm_apply4(x[at + min(2u * p, width - 2u)], min(2u * p, width - 2u)) * factor;
    let b = norm_apply4(x[at + min(2u * p + 1u, width - 1u)], min(2u * p + 1u, width - 1u)) * factor;
    half[group.x * (params.half_stride / 8u) + p] = select(vec4<u32>(), vec4<u32>(pack2x16float(a.xz), pack2x16float(a.yw), pack2x16float(b.xz), pack2x16float(b.yw)), inside);
  }
}
