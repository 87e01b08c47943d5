// x as int8 for tiles, 32 columns to a scale: code = round(127 v / max |v|), v being x or gamma * x.        reference.quantize_int8
// One workgroup a token; its LANES invocations are a team and share the blocks of 32 columns. What tiles read is contiguous along the tokens.
// Workgroup memory: that of the team part.   Options: LANES, WORKGROUP = LANES; parts: step, norm_rms or norm_none, token_*, team_*.

struct Params { columns: u32, x_stride: u32, tokens: u32, eps: f32 }

var<uniform> params: Params;                     // tokens: that there is room for
var<storage, read> x: array<vec4<f32>>;          // (tokens, x_stride) f32; columns is a multiple of 32
var<storage, read_write> codes: array<vec4<u32>>; // (columns / 16, tokens) sixteen int8
var<storage, read_write> units: array<vec2<f32>>; // (columns / 32, tokens) of (what a code of 1 stands for, the sum of the 32 values as rounded) f32
var<storage, read_write> scale: array<f32>;      // (tokens) f32: what the norm leaves to be multiplied

// As integers, the absolute values of floats have the same order, and NaN is the highest.
fn sizes(v: vec4<f32>) -> vec4<u32> { return bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu); }
fn highest(v: mat4x4<f32>) -> u32 {
  let h = max(max(sizes(v[0]), sizes(v[1])), max(sizes(v[2]), sizes(v[3])));
  return max(max(h.x, h.y), max(h.z, h.w));
}
fn coded(v: vec4<f32>, factor: f32) -> u32 { return pack4xI8(vec4<i32>(round(v * factor))); }
fn coded16(v: mat4x4<f32>, factor: f32) -> vec4<u32> { return vec4<u32>(coded(v[0], factor), coded(v[1], factor), coded(v[2], factor), coded(v[3], factor)); }
fn total16(v: vec4<u32>) -> i32 {
  let one = 0x01010101u;
  return dot4I8Packed(v.x, one) + dot4I8Packed(v.y, one) + dot4I8Packed(v.z, one) + dot4I8Packed(v.w, one);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  if (group.x >= step.count) { return; }
  team_index = index;
  let at = input_token(group.x) * (params.x_stride / 4u);
  var squares = 0.0;
  for (var block = index; block < params.columns / 32u; block += LANES) {
    let i = at + block * 8u;
    let raw_a = mat4x4<f32>(x[i], x[i + 1u], x[i + 2u], x[i + 3u]);
    let raw_b = mat4x4<f32>(x[i + 4u], x[i + 5u], x[i + 6u], x[i + 7u]);
    squares += norm_squares(raw_a) + norm_squares(raw_b);
    let a = norm_apply(raw_a, norm_gain(2u * block));
    let b = norm_apply(raw_b, norm_gain(2u * block + 1u));
    let high = bitcast<f32>(max(highest(a), highest(b)));
    let factor = select(0.0, 127.0 / high, high > 1e-35);       // what is smaller counts as zero: 127 / high would overflow
    let unit = high / 127.0;
    let code_a = coded16(a, factor);
    let code_b = coded16(b, factor);
    codes[2u * block * params.tokens + group.x] = code_a;
    codes[(2u * block + 1u) * params.tokens + group.x] = code_b;
    units[block * params.tokens + group.x] = vec2<f32>(unit, unit * f32(total16(code_a) + total16(code_b)));
  }
  let norm = norm_scale(squares);
  if (index == 0u) { scale[group.x] = norm; }
}
