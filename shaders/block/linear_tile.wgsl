// y = epilogue(W . norm(x)) for many tokens: tiles of W and x go through workgroup memory.        reference.linear, rms_norm, swiglu, apply_rope
// A workgroup computes TILE_ROWS rows for TILE_TOKENS tokens, an invocation 4 * ROW_QUADS rows for 4 * TOKEN_QUADS tokens, both in fours.
// W is dequantised once a tile. A column of a tile is contiguous, so that a load gives four rows or tokens and each meets each. Within a column
// fours are swizzled by the column, or writes of several columns of one row or token would share banks. Neighbouring invocations read in pairs
// what is the same, which halves the time of a load of 16 bytes on GPUs with subgroups of 32.
// Workgroup memory: 4 * STEP * (TILE_ROWS + TILE_TOKENS).
// Options: TILE_ROWS, TILE_TOKENS, ROW_QUADS, TOKEN_QUADS, STEP, ROWS = 4, QUADS = 1, PAIRS = 2, W_LOADS = TILE_ROWS * STEP / 16 / WORKGROUP,
// X_LOADS = TILE_TOKENS * STEP / 4 / WORKGROUP, WORKGROUP = ACROSS * TILE_TOKENS / (4 * TOKEN_QUADS), a multiple of 32, ACROSS of 8;
// parts: step, weights_* or codes_* and scales_*, norm_*, bias_*, token_*, heads_plain, output_*, end_none or cache_store_*.

struct Params { columns: u32, rows: u32, x_stride: u32, y_stride: u32, first_row: u32, eps: f32 }

const ACROSS = TILE_ROWS / (4u * ROW_QUADS);     // invocations side by side along the rows
const DOWN = TILE_TOKENS / (4u * TOKEN_QUADS);
const STEP_CHUNKS = STEP / 16u;
const STEP_QUADS = STEP / 4u;
const W_SWIZZLE = 8u / STEP_CHUNKS;
const X_SWIZZLE = 8u / STEP_QUADS;

var<uniform> params: Params;                     // rows: of this piece of W, whose row 0 is row first_row of the whole
var<storage, read> x: array<vec4<f32>>;          // (tokens, x_stride) f32; columns beyond `columns` are 0

// An index that is constant needs no bounds check, and one that does not depend on the column is checked once.
var<workgroup> w_tile: array<array<vec4<f32>, TILE_ROWS / 4u>, STEP>;
var<workgroup> x_tile: array<array<vec4<f32>, TILE_TOKENS / 4u>, STEP>;

fn team_add(value: f32) -> f32 { return value; }     // norm_scale gets sums that are complete

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let first_token = group.z * TILE_TOKENS;
  if (first_token >= step.count) { return; }                                  // the chunk's unused end
  let first_row = (group.x + group.y * groups.x) * TILE_ROWS;
  let last_token = step.count - 1u;
  let team = index / 32u;                        // takes 8 invocations along the rows by 4 along the tokens
  let across = team % (ACROSS / 8u) * 8u + index / 2u % 8u;
  let down = team / (ACROSS / 8u) * 4u + index / 16u % 2u * 2u + index % 2u;
  let chunks = (params.columns + 15u) / 16u;
  let quads = 4u * chunks;
  let steps = (chunks + STEP_CHUNKS - 1u) / STEP_CHUNKS;
  // The next tile is loaded into registers while this one is multiplied.
  let x_quad = index % STEP_QUADS;
  //@ unroll n in 0..X_LOADS
  let token$n = index / STEP_QUADS + $nu * (WORKGROUP / STEP_QUADS);
  let x_at$n = input_token(min(first_token + token$n, last_token)) * (params.x_stride / 4u);
  let x_place$n = (token$n / 4u) ^ (X_SWIZZLE * x_quad);
  var squares$n = 0.0;
  var x$n = x[x_at$n + min(x_quad, quads - 1u)];
  //@ end
  //@ unroll u in 0..TOKEN_QUADS
  //@ unroll t in 0..4
  //@ unroll q in 0..ROW_QUADS
  var sum$u_$t_$q = vec4<f32>();
  //@ end
  //@ end
  //@ end
  //@ unroll n in 0..W_LOADS
  let row$n = (index + $nu * WORKGROUP) / STEP_CHUNKS;
  let chunk$n = (index + $nu * WORKGROUP) % STEP_CHUNKS;
  let w_place$n = (row$n / 4u) ^ (W_SWIZZLE * chunk$n);
  let source$n = min(first_row + row$n, params.rows - 1u);
  var code$n = codes_load(source$n, min(chunk$n, chunks - 1u));
  var scales$n = scales_load(source$n, min(chunk$n, chunks - 1u));
  //@ end
  for (var s = 0u; s < steps; s++) {
    //@ unroll n in 0..W_LOADS
    {
      let code = codes_floats(code$n);
      let affine = scales_affine(scales$n, source$n, min(s * STEP_CHUNKS + chunk$n, chunks - 1u));
      //@ unroll c in 0..4
      let w$c = fma(code[$c], vec4<f32>(affine.x), vec4<f32>(affine.y));
      //@ unroll r in 0..4
      w_tile[chunk$n * 16u + 4u * $cu + $ru][w_place$n][row$n % 4u] = w$c[$r];
      //@ end
      //@ end
    }
    //@ end
    let quad = s * STEP_QUADS + x_quad;
    //@ unroll n in 0..X_LOADS
    {
      let raw = select(vec4<f32>(), x$n, quad < quads);                        // beyond the columns: zeros; a branch around the loads would wait for them
      squares$n += norm_square(raw);
      let v = norm_apply4(raw, min(quad, quads - 1u));
      //@ unroll r in 0..4
      x_tile[x_quad * 4u + $ru][x_place$n][token$n % 4u] = v[$r];
      //@ end
    }
    //@ end
    workgroupBarrier();
    if (s + 1u < steps) {
      //@ unroll n in 0..W_LOADS
      code$n = codes_load(source$n, min((s + 1u) * STEP_CHUNKS + chunk$n, chunks - 1u));
      scales$n = scales_load(source$n, min((s + 1u) * STEP_CHUNKS + chunk$n, chunks - 1u));
      //@ end
      //@ unroll n in 0..X_LOADS
      x$n = x[x_at$n + min(quad + STEP_QUADS, quads - 1u)];
      //@ end
    }
    //@ unroll c in 0..STEP
    {
      //@ unroll q in 0..ROW_QUADS
      let w$q = w_tile[$c][($qu * ACROSS + across) ^ (W_SWIZZLE * ($cu / 16u))];
      //@ end
      //@ unroll u in 0..TOKEN_QUADS
      let v$u = x_tile[$c][($uu * DOWN + down) ^ (X_SWIZZLE * ($cu / 4u))];
      //@ unroll t in 0..4
      //@ unroll q in 0..ROW_QUADS
      sum$u_$t_$q = fma(vec4<f32>(v$u[$t]), w$q, sum$u_$t_$q);
      //@ end
      //@ end
      //@ end
    }
    //@ end
    workgroupBarrier();
  }
  //@ unroll n in 0..X_LOADS
  x_tile[x_quad][token$n / 4u][token$n % 4u] = squares$n;
  //@ end
  workgroupBarrier();
  //@ unroll u in 0..TOKEN_QUADS
  //@ unroll t in 0..4
  {
    let place = $uu * DOWN + down;
    let token = first_token + place * 4u + $tu;
    var total = 0.0;
    for (var i = 0u; i < STEP_QUADS; i++) { total += x_tile[i][place][$t]; }
    let scale = norm_scale(total);
    if (token <= last_token) {
      //@ unroll q in 0..ROW_QUADS
      {
        let row = first_row + ($qu * ACROSS + across) * 4u;
        if (row < params.rows) {
          var results: array<f32, ROWS>;
          //@ unroll r in 0..4
          results[$r] = sum$u_$t_$q[$r] * scale + bias_at(min(row + $ru, params.rows - 1u));
          //@ end
          output(row, token, results, output_load(row, token));
        }
      }
      //@ end
    }
  }
  //@ end
  //@ end
}
