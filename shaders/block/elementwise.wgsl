// y[t, i] = combine(a[t, i], b[t, i]) over rows of different strides.
// Each invocation computes one value.   Workgroup memory: none.   Options: WORKGROUP; parts: step, combine_*.

struct Params { columns: u32, a_stride: u32, b_stride: u32, b_first: u32, y_stride: u32 }

var<uniform> params: Params;                     // b_first: the column of b that column 0 of a meets
var<storage, read> a: array<f32>;                // (tokens, a_stride) f32
var<storage, read> b: array<f32>;                // (tokens, b_stride) f32
var<storage, read_write> y: array<f32>;          // (tokens, y_stride) f32

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
  if (id.x >= params.columns || id.y >= step.count) { return; }
  y[id.y * params.y_stride + id.x] = combine(a[id.y * params.a_stride + id.x], b[id.y * params.b_stride + params.b_first + id.x]);
}
