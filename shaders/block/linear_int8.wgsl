// y = epilogue(W . q8(gamma * x) * norm scale): `linear.wgsl` with the activations rounded to int8, 32 columns to a scale.
//                                                                        reference.linear_int8
// A team of LANES invocations computes ROWS rows of W for TOKENS tokens; its lanes share the columns in blocks of 32, which each lane
// quantises for itself: code = round(127 v / max |v|). Codes of W and x meet in dot4I8Packed, four products an instruction.
// With w = scale * code + offset, a half block's dot is unit * (scale * (codes . codes) + offset * sum of codes), sums exact in i32.
// Workgroup memory: that of the team part and of heads_norm.
// Options: LANES, ROWS, QUADS = ROWS / 4, PAIRS = ROWS / 2, TOKENS, WORKGROUP; parts: step, codes_* and scales_*, norm_*, bias_*, team_*, token_*, heads_*, output_*, end_none or cache_store_*.

struct Params { columns: u32, rows: u32, x_stride: u32, y_stride: u32, first_row: u32, eps: f32 }

const HEAD_SLOTS = WORKGROUP / LANES;

var<uniform> params: Params;                     // rows: of this piece of W, whose row 0 is row first_row of the whole
var<storage, read> x: array<vec4<f32>>;          // (tokens, x_stride) f32; columns is a multiple of 32

// As integers, the absolute values of floats have the same order, and NaN is the highest.
fn sizes(v: vec4<f32>) -> vec4<u32> { return bitcast<vec4<u32>>(v) & vec4<u32>(0x7fffffffu); }
fn highest(v: mat4x4<f32>) -> u32 {
  let h = max(max(sizes(v[0]), sizes(v[1])), max(sizes(v[2]), sizes(v[3])));
  return max(max(h.x, h.y), max(h.z, h.w));
}
fn coded(v: vec4<f32>, factor: f32) -> u32 { return pack4xI8(vec4<i32>(round(v * factor))); }
fn coded16(v: mat4x4<f32>, factor: f32) -> vec4<u32> { return vec4<u32>(coded(v[0], factor), coded(v[1], factor), coded(v[2], factor), coded(v[3], factor)); }
fn dot16(a: vec4<u32>, b: vec4<u32>) -> f32 { return f32(dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y) + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w)); }

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let token = group.z * TOKENS;
  if (token >= step.count) { return; }                                               // the chunk's unused end
  team_index = index;
  let lane = index % LANES;
  let row = ((group.x + group.y * groups.x) * (WORKGROUP / LANES) + index / LANES) * ROWS;   // linear: there may be more than 65,535 groups
  let last_token = step.count - 1u;
  let ones = vec4<u32>(0x01010101u);
  //@ unroll t in 0..TOKENS
  let x$t = input_token(min(token + $tu, last_token)) * (params.x_stride / 4u);
  var squares$t = 0.0;
  //@ end
  //@ unroll r in 0..ROWS
  let row$r = min(row + $ru, params.rows - 1u);
  //@ unroll t in 0..TOKENS
  var sum$r_$t = 0.0;
  //@ end
  //@ end
  for (var block = lane; block < params.columns / 32u; block += LANES) {
    let first = 2u * block;                      // chunks of 16 columns
    let gain_a = norm_gain(first);
    let gain_b = norm_gain(first + 1u);
    //@ unroll t in 0..TOKENS
    let at$t = x$t + block * 8u;
    let raw_a$t = mat4x4<f32>(x[at$t], x[at$t + 1u], x[at$t + 2u], x[at$t + 3u]);
    let raw_b$t = mat4x4<f32>(x[at$t + 4u], x[at$t + 5u], x[at$t + 6u], x[at$t + 7u]);
    squares$t += norm_squares(raw_a$t) + norm_squares(raw_b$t);
    let in_a$t = norm_apply(raw_a$t, gain_a);
    let in_b$t = norm_apply(raw_b$t, gain_b);
    let high$t = bitcast<f32>(max(highest(in_a$t), highest(in_b$t)));
    let factor$t = select(0.0, 127.0 / high$t, high$t > 1e-35);       // what is smaller counts as zero: 127 / high would overflow
    let unit$t = high$t / 127.0;
    let code_a$t = coded16(in_a$t, factor$t);
    let code_b$t = coded16(in_b$t, factor$t);
    let total_a$t = dot16(code_a$t, ones);
    let total_b$t = dot16(code_b$t, ones);
    //@ end
    //@ unroll r in 0..ROWS
    {
      let w_a = codes_ints(codes_load(row$r, first));
      let w_b = codes_ints(codes_load(row$r, first + 1u));
      let affine_a = scales_affine(scales_load(row$r, first), row$r, first);
      let affine_b = scales_affine(scales_load(row$r, first + 1u), row$r, first + 1u);
      //@ unroll t in 0..TOKENS
      let a$t = fma(affine_a.x, dot16(w_a, code_a$t), affine_a.y * total_a$t);
      let b$t = fma(affine_b.x, dot16(w_b, code_b$t), affine_b.y * total_b$t);
      sum$r_$t = fma(unit$t, a$t + b$t, sum$r_$t);
      //@ end
    }
    //@ end
  }
  //@ unroll t in 0..TOKENS
  {
    let scale = norm_scale(squares$t);
    var results: array<f32, ROWS>;
    //@ unroll r in 0..ROWS
    results[$r] = team_add(sum$r_$t) * scale + bias_at(row$r);
    //@ end
    let gain = head_gain(row, index / LANES, lane == 0u, results);
    //@ unroll r in 0..ROWS
    results[$r] *= gain * head_weight(row$r);
    //@ end
    if (lane == 0u && token + $tu <= last_token) { output(row, token + $tu, results, output_load(row, token + $tu)); }
    output_end(row - index / LANES * ROWS, token + $tu, index);
  }
  //@ end
}
