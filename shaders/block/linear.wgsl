// y = epilogue(W . norm(x)): one projection of a transformer block, its norm in front and its epilogue behind.
//                                                                        reference.linear, rms_norm, swiglu, apply_rope
// A team of LANES invocations computes ROWS rows of W for TOKENS tokens; its lanes share the columns in chunks of 16.
// The norm's scale is one number a token, so it is applied after the dot products and costs no pass of its own.
// Weights are affine in chunks, w = scale * code + offset, so a chunk's dot is scale * (codes . x) + offset * sum(x).
// Workgroup memory: that of the team part, of norm_shared and of heads_norm.
// Options: LANES, ROWS (a multiple of 4), QUADS = ROWS / 4, PAIRS = ROWS / 2, TOKENS, WORKGROUP; parts: step, weights_* or codes_* and scales_*, norm_*, bias_*, team_*, token_*, heads_*, output_*, end_none or cache_store_*.

struct Params { columns: u32, rows: u32, x_stride: u32, y_stride: u32, first_row: u32, eps: f32 }

const HEAD_SLOTS = WORKGROUP / LANES;

var<uniform> params: Params;                     // rows: of this piece of W, whose row 0 is row first_row of the whole
var<storage, read> x: array<vec4<f32>>;          // (tokens, x_stride) f32; columns beyond `columns` are 0

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let token = group.z * TOKENS;
  if (token >= step.count) { return; }                                               // the chunk's unused end
  team_index = index;
  let lane = index % LANES;
  let row = ((group.x + group.y * groups.x) * (WORKGROUP / LANES) + index / LANES) * ROWS;   // linear: there may be more than 65,535 groups
  let last_token = step.count - 1u;
  //@ unroll t in 0..TOKENS
  let x$t = input_token(min(token + $tu, last_token)) * (params.x_stride / 4u);
  var squares$t = 0.0;
  //@ end
  //@ unroll r in 0..ROWS
  let row$r = min(row + $ru, params.rows - 1u);
  //@ unroll t in 0..TOKENS
  var sum$r_$t = vec4<f32>();
  //@ end
  //@ end
  let chunks = (params.columns + 15u) / 16u;
  norm_prepare(x0, index);
  for (var chunk = lane; chunk < chunks; chunk += LANES) {
    let gain = norm_gain(chunk);
    //@ unroll t in 0..TOKENS
    let raw$t = mat4x4<f32>(norm_input(x$t, chunk * 4u), norm_input(x$t, chunk * 4u + 1u), norm_input(x$t, chunk * 4u + 2u), norm_input(x$t, chunk * 4u + 3u));
    squares$t += norm_squares(raw$t);
    let in$t = norm_apply(raw$t, gain);
    let total$t = in$t[0] + in$t[1] + in$t[2] + in$t[3];
    //@ end
    //@ unroll r in 0..ROWS
    {
      let code = codes_floats(codes_load(row$r, chunk));
      let affine = scales_affine(scales_load(row$r, chunk), row$r, chunk);
      //@ unroll t in 0..TOKENS
      let dot$t = fma(code[0], in$t[0], fma(code[1], in$t[1], fma(code[2], in$t[2], code[3] * in$t[3])));
      sum$r_$t = fma(vec4<f32>(affine.x), dot$t, fma(vec4<f32>(affine.y), total$t, sum$r_$t));
      //@ end
    }
    //@ end
  }
  //@ unroll t in 0..TOKENS
  {
    let scale = norm_scale(squares$t);
    var results: array<f32, ROWS>;
    //@ unroll r in 0..ROWS
    results[$r] = dot(sum$r_$t, vec4<f32>(1.0));
    //@ end
    //@ unroll q in 0..QUADS
    {
      let four = team_add4(vec4<f32>(results[4 * $q], results[4 * $q + 1], results[4 * $q + 2], results[4 * $q + 3])) * scale;
      results[4 * $q] = four.x;
      results[4 * $q + 1] = four.y;
      results[4 * $q + 2] = four.z;
      results[4 * $q + 3] = four.w;
    }
    //@ end
    //@ unroll r in 0..ROWS
    results[$r] += bias_at(row$r);
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
