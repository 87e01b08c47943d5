// y += sums that are still to be added to it.
// Each invocation computes four values.   Workgroup memory: none.   Options: SUMS, WORKGROUP.

struct Params { stride: u32 }

var<uniform> params: Params;
var<storage, read> sums_pending: array<vec4<f32>>;  // (SUMS, stride) f32
var<storage, read_write> y: array<vec4<f32>>;       // (1, stride) f32

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= params.stride / 4u) { return; }
  var v = y[id.x];
  for (var s = 0u; s < SUMS; s++) { v += sums_pending[s * (params.stride / 4u) + id.x]; }
  y[id.x] = v;
}
