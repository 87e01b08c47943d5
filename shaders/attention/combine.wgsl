// Join the splits of split.wgsl: o = sum_s 2^(m_s - m) o_s / sum_s 2^(m_s - m) l_s.        reference.merge_state
// One workgroup a head and token; each invocation takes four channels at a time.
// Workgroup memory: none.   Options: HEADS, HEAD_DIM, WORKGROUP; parts: step.

struct Params { splits: u32 }

const WIDTH = HEAD_DIM / 4u;
const LOWEST = -3.4028235e38;

var<uniform> params: Params;
var<storage, read> partial_out: array<vec4<f32>>;   // (tokens, HEADS, splits, HEAD_DIM) f32
var<storage, read> partial_stat: array<vec2<f32>>;  // (tokens, HEADS, splits) of (max, sum) f32
var<storage, read_write> y: array<vec4<f32>>;       // (tokens, HEADS, HEAD_DIM) f32

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let token = group.z;
  if (token >= step.count) { return; }
  let at = (token * HEADS + group.x) * params.splits;
  var highest = LOWEST;
  for (var s = 0u; s < params.splits; s++) { highest = max(highest, partial_stat[at + s].x); }
  for (var i = index; i < WIDTH; i += WORKGROUP) {
    var sum = 0.0;
    var out = vec4<f32>();
    for (var s = 0u; s < params.splits; s++) {
      let stat = partial_stat[at + s];
      let weight = select(0.0, exp2(stat.x - highest), stat.y > 0.0);
      sum = fma(weight, stat.y, sum);
      out = fma(vec4<f32>(weight), partial_out[(at + s) * WIDTH + i], out);
    }
    y[(token * HEADS + group.x) * WIDTH + i] = select(vec4<f32>(), out / sum, sum > 0.0);
  }
}
