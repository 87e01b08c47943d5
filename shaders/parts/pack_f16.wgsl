// packed = f16(values), two a word: for rows of f16 that share words, which no two invocations may write. Values beyond f16 saturate.
// Each invocation writes one word.   Workgroup memory: none.   Options: WORKGROUP.

struct Params { count: u32 }

var<uniform> params: Params;
var<storage, read> values: array<f32>;           // (count) f32
var<storage, read_write> packed: array<u32>;     // (count) f16

override WORKGROUP: u32 = 64;

fn value_at(i: u32) -> f32 {
  let v = values[min(i, params.count - 1u)];
  return select(0.0, select(v, clamp(v, -65504.0, 65504.0), abs(v) > 65504.0), i < params.count);   // NaN stays
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let i = (group.x + group.y * groups.x) * WORKGROUP + index;
  if (i * 2u < params.count) { packed[i] = pack2x16float(vec2<f32>(value_at(i * 2u), value_at(i * 2u + 1u))); }
}
