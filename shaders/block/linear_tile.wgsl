// y = epilogue(W . norm(x)) for many tokens: tiles of W and x go through workgroup memory.        reference.linear, rms_norm, swiglu, apply_rope
// A workgroup computes TILE_ROWS rows for TILE_TOKENS tokens, an invocation 4 * QUADS_EACH rows (in fours) for TOKENS_EACH tokens.
// W is dequantised once a tile. Rows of a tile are 8 vec4s long and their order is swizzled so that neither writes nor reads share a bank.
// Workgroup memory: 128 * (TILE_ROWS + TILE_TOKENS) + 4 * WORKGROUP.
// Options: TILE_ROWS, TILE_TOKENS, QUADS_EACH, TOKENS_EACH, ROWS = 4, QUADS = 1, PAIRS = 2, W_LOADS = 2 * TILE_ROWS / WORKGROUP (rounded up),
// X_LOADS = 8 * TILE_TOKENS / WORKGROUP, WORKGROUP = TILE_ROWS / (4 * QUADS_EACH) * TILE_TOKENS / TOKENS_EACH, a multiple of TILE_TOKENS;
// parts: step, weights_* or codes_* and scales_*, norm_*, bias_*, token_*, heads_plain, output_*, end_none or cache_store_*.

struct Params { columns: u32, rows: u32, x_stride: u32, y_stride: u32, first_row: u32, eps: f32 }

const ACROSS = TILE_ROWS / (4u * QUADS_EACH);    // invocations side by side along the rows

var<uniform> params: Params;                     // rows: of this piece of W, whose row 0 is row first_row of the whole
var<storage, read> x: array<vec4<f32>>;          // (tokens, x_stride) f32; columns beyond `columns` are 0

var<workgroup> w_tile: array<vec4<f32>, TILE_ROWS * 8u>;
var<workgroup> x_tile: array<vec4<f32>, TILE_TOKENS * 8u>;
var<workgroup> square_sums: array<f32, WORKGROUP>;

fn team_add(value: f32) -> f32 { return value; }     // norm_scale gets sums that are complete
fn w_slot(row: u32, c: u32) -> u32 { return row * 8u + (c ^ ((row / 4u + 2u * row) & 7u)); }
fn x_slot(token: u32, c: u32) -> u32 { return token * 8u + (c ^ (token & 7u)); }

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let first_token = group.z * TILE_TOKENS;
  if (first_token >= step.count) { return; }                                  // the chunk's unused end
  let first_row = (group.x + group.y * groups.x) * TILE_ROWS;
  let last_token = step.count - 1u;
  let across = index % ACROSS;
  let down = index / ACROSS;
  let x_token = index % TILE_TOKENS;
  let x_at = input_token(min(first_token + x_token, last_token)) * (params.x_stride / 4u);
  var squares = 0.0;
  //@ unroll t in 0..TOKENS_EACH
  //@ unroll q in 0..QUADS_EACH
  //@ unroll r in 0..4
  var sum$t_$q_$r = 0.0;
  //@ end
  //@ end
  //@ end
  let chunks = (params.columns + 15u) / 16u;
  // The next tile is loaded into registers while this one is multiplied.
  //@ unroll n in 0..W_LOADS
  let row$n = (index + $nu * WORKGROUP) / 2u;    // of two chunks a row, an invocation takes one
  let half$n = (index + $nu * WORKGROUP) % 2u;
  let source$n = min(first_row + row$n, params.rows - 1u);
  var code$n = codes_load(source$n, min(half$n, chunks - 1u));
  var scales$n = scales_load(source$n, min(half$n, chunks - 1u));
  //@ end
  //@ unroll n in 0..X_LOADS
  let c$n = index / TILE_TOKENS + $nu * (WORKGROUP / TILE_TOKENS);
  var x$n = x[x_at + min(c$n, chunks * 4u - 1u)];
  //@ end
  for (var chunk = 0u; chunk < chunks; chunk += 2u) {
    //@ unroll n in 0..W_LOADS
    if (row$n < TILE_ROWS) {
      let code = codes_floats(code$n);
      let affine = scales_affine(scales$n, source$n, min(chunk + half$n, chunks - 1u));
      let scale = vec4<f32>(select(0.0, affine.x, chunk + half$n < chunks));   // beyond the columns: zeros
      let offset = vec4<f32>(select(0.0, affine.y, chunk + half$n < chunks));
      w_tile[w_slot(row$n, half$n * 4u)] = fma(code[0], scale, offset);
      w_tile[w_slot(row$n, half$n * 4u + 1u)] = fma(code[1], scale, offset);
      w_tile[w_slot(row$n, half$n * 4u + 2u)] = fma(code[2], scale, offset);
      w_tile[w_slot(row$n, half$n * 4u + 3u)] = fma(code[3], scale, offset);
    }
    //@ end
    //@ unroll n in 0..X_LOADS
    {
      let inside = chunk * 4u + c$n < chunks * 4u;
      squares += select(0.0, norm_square(x$n), inside);
      x_tile[x_slot(x_token, c$n)] = select(vec4<f32>(), norm_apply4(x$n, min(chunk * 4u + c$n, chunks * 4u - 1u)), inside);
    }
    //@ end
    if (chunk + 2u < chunks) {
      //@ unroll n in 0..W_LOADS
      code$n = codes_load(source$n, min(chunk + 2u + half$n, chunks - 1u));
      scales$n = scales_load(source$n, min(chunk + 2u + half$n, chunks - 1u));
      //@ end
      //@ unroll n in 0..X_LOADS
      x$n = x[x_at + min((chunk + 2u) * 4u + c$n, chunks * 4u - 1u)];
      //@ end
    }
    workgroupBarrier();
    for (var c = 0u; c < 8u; c++) {
      //@ unroll q in 0..QUADS_EACH
      //@ unroll r in 0..4
      let w$q_$r = w_tile[w_slot(($qu * ACROSS + across) * 4u + $ru, c)];
      //@ end
      //@ end
      //@ unroll t in 0..TOKENS_EACH
      {
        let v = x_tile[x_slot(down * TOKENS_EACH + $tu, c)];
        //@ unroll q in 0..QUADS_EACH
        //@ unroll r in 0..4
        sum$t_$q_$r = fma(v.x, w$q_$r.x, fma(v.y, w$q_$r.y, fma(v.z, w$q_$r.z, fma(v.w, w$q_$r.w, sum$t_$q_$r))));
        //@ end
        //@ end
      }
      //@ end
    }
    workgroupBarrier();
  }
  square_sums[index] = squares;
  workgroupBarrier();
  //@ unroll t in 0..TOKENS_EACH
  {
    let token = down * TOKENS_EACH + $tu;
    var total = 0.0;
    for (var i = token; i < WORKGROUP; i += TILE_TOKENS) { total += square_sums[i]; }
    let scale = norm_scale(total);
    if (first_token + token <= last_token) {
      //@ unroll q in 0..QUADS_EACH
      {
        let row = first_row + ($qu * ACROSS + across) * 4u;
        if (row < params.rows) {
          var results: array<f32, ROWS>;
          //@ unroll r in 0..4
          results[$r] = sum$t_$q_$r * scale + bias_at(min(row + $ru, params.rows - 1u));
          //@ end
          output(row, first_token + token, results, output_load(row, first_token + token));
        }
      }
      //@ end
    }
  }
  //@ end
}
