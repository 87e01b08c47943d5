// y = epilogue(W . x) for many tokens on matrix units: tiles of W and x as f16 in workgroup memory, products summed in f32.   reference.linear
// A workgroup computes TILE_TOKENS x TILE_ROWS results, a subgroup SUB_TOKENS x SUB_ROWS of them in matrices of 16 x 16; W is dequantised once a
// tile. x comes from block/half.wgsl, normed and with a scale for each token.
// Tiles have STEP columns: while one is multiplied, the next comes from memory into registers: from before the barrier (FETCH 0), from behind it (1), or
// from the second chunk on (2). With two BUFFERS a step has one barrier: what is stored is not what others still multiply.
// Workgroup memory: max(2 * BUFFERS * (STEP + 8) * (TILE_TOKENS + TILE_ROWS), 64 * SUB_ROWS * WORKGROUP / SUBGROUP): rows of tiles are STEP + 8 halves, so that
// lanes share no bank; at the end 16 x SUB_ROWS floats a subgroup.
// Options: TILE_TOKENS, TILE_ROWS, SUB_TOKENS, SUB_ROWS, TOKEN_MATRICES = SUB_TOKENS / 16, ROW_MATRICES = SUB_ROWS / 16, STEP, STEP_CHUNKS = STEP / 16, BUFFERS (1 or 2), FETCH (at most STEP_CHUNKS),
// W_LOADS = STEP_CHUNKS * TILE_ROWS / WORKGROUP, X_LOADS = STEP / 8 * TILE_TOKENS / WORKGROUP, WORKGROUP, SUBGROUP, MEMORY, ROWS = 4, PAIRS = 2, QUADS = 1;
// parts: step, weights_* or codes_* and scales_*, halves_*, bias_*, token_each, heads_plain, output_*, end_none or cache_store_*.

struct Params { columns: u32, rows: u32, x_stride: u32, y_stride: u32, first_row: u32, eps: f32 }

const ACROSS = TILE_ROWS / SUB_ROWS;             // subgroups side by side along the rows
const TILE_STRIDE = STEP + 8u;                    // halves
const W_VECTORS = TILE_ROWS * TILE_STRIDE / 8u;
const X_VECTORS = TILE_TOKENS * TILE_STRIDE / 8u;
const BUFFER = 16u * (W_VECTORS + X_VECTORS);    // bytes

alias Left = subgroup_matrix_left<f16, 16, 16>;
alias Right = subgroup_matrix_right<f16, 16, 16>;
alias Sums = subgroup_matrix_result<f32, 16, 16>;

var<uniform> params: Params;                     // rows: of this piece of W, whose row 0 is row first_row of the whole
var<storage, read> x: array<vec4<u32>>;          // (tokens, x_stride) f16, x_stride a multiple of 64
var<storage, read> x_scale: array<f32>;          // (tokens) f32

var<workgroup> memory: buffer<MEMORY>;           // the only variable: others would share its bytes

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let first_token = group.z * TILE_TOKENS;
  if (first_token >= step.count) { return; }                                  // the chunk's unused end
  let first_row = (group.x + group.y * groups.x) * TILE_ROWS;
  let last_token = step.count - 1u;
  let team = index / SUBGROUP;
  let lane = index % SUBGROUP;
  let team_token = team / ACROSS * SUB_TOKENS;
  let team_row = team % ACROSS * SUB_ROWS;
  //@ unroll h in 0..BUFFERS
  let w_vectors$h = bufferView<array<vec4<u32>, W_VECTORS>>(&memory, $hu * BUFFER);
  let x_vectors$h = bufferView<array<vec4<u32>, X_VECTORS>>(&memory, $hu * BUFFER + W_VECTORS * 16u);
  let w_halves$h = bufferView<array<f16, W_VECTORS * 8u>>(&memory, $hu * BUFFER);
  let x_halves$h = bufferView<array<f16, X_VECTORS * 8u>>(&memory, $hu * BUFFER + W_VECTORS * 16u);
  //@ end
  let chunks = (params.columns + 15u) / 16u;
  //@ unroll i in 0..TOKEN_MATRICES
  //@ unroll j in 0..ROW_MATRICES
  var sum$i_$j: Sums;
  //@ end
  //@ end
  //@ unroll n in 0..W_LOADS
  let chunk$n = (index + $nu * WORKGROUP) % STEP_CHUNKS;       // an invocation takes one chunk of a row
  let row$n = (index + $nu * WORKGROUP) / STEP_CHUNKS;
  let source$n = min(first_row + row$n, params.rows - 1u);
  var code$n = codes_load(source$n, min(chunk$n, chunks - 1u));
  var scales$n = scales_load(source$n, min(chunk$n, chunks - 1u));
  //@ end
  //@ unroll n in 0..X_LOADS
  let token$n = (index + $nu * WORKGROUP) / (STEP / 8u);
  let piece$n = (index + $nu * WORKGROUP) % (STEP / 8u);
  let from$n = min(first_token + token$n, last_token) * (params.x_stride / 8u) + piece$n;
  var x$n = x[from$n];
  //@ end
  var first = 0u;
  loop {
    //@ unroll h in 0..BUFFERS
    {
      //@ unroll n in 0..W_LOADS
      {
        let at = min(first + chunk$n, chunks - 1u);   // beyond the columns x is zero
        let pair = codes_halves(code$n, scales_affine(scales$n, source$n, at));
        let to = row$n * (TILE_STRIDE / 8u) + chunk$n * 2u;
        w_vectors$h[to] = pair[0];
        w_vectors$h[to + 1u] = pair[1];
      }
      //@ end
      //@ unroll n in 0..X_LOADS
      x_vectors$h[token$n * (TILE_STRIDE / 8u) + piece$n] = x$n;
      //@ end
      first += STEP_CHUNKS;                           // the next
      //@ unroll k in 0..STEP_CHUNKS
      if ($ku == 0u && FETCH > 0u) { workgroupBarrier(); }
      if (max(FETCH, 1u) == $ku + 1u && first < chunks) {
        //@ unroll n in 0..W_LOADS
        code$n = codes_load(source$n, min(first + chunk$n, chunks - 1u));
        scales$n = scales_load(source$n, min(first + chunk$n, chunks - 1u));
        //@ end
        //@ unroll n in 0..X_LOADS
        x$n = x[from$n + first * 2u];
        //@ end
      }
      if ($ku == 0u && FETCH == 0u) { workgroupBarrier(); }
      {
        //@ unroll i in 0..TOKEN_MATRICES
        let left$i = subgroupMatrixLoad<Left, row_major>(x_halves$h, (team_token + $iu * 16u) * TILE_STRIDE + $ku * 16u, TILE_STRIDE);
        //@ end
        //@ unroll j in 0..ROW_MATRICES
        {
          let w = subgroupMatrixLoad<Right, col_major>(w_halves$h, (team_row + $ju * 16u) * TILE_STRIDE + $ku * 16u, TILE_STRIDE);
          //@ unroll i in 0..TOKEN_MATRICES
          sum$i_$j = subgroupMatrixMultiplyAccumulate(left$i, w, sum$i_$j);
          //@ end
        }
        //@ end
      }
      //@ end
      if (first >= chunks) { break; }
      if (BUFFERS == 1u) { workgroupBarrier(); }
    }
    //@ end
  }
  workgroupBarrier();
  // Results have no element access: 16 tokens at a time they go through workgroup memory.
  let out_floats = bufferView<array<f32, WORKGROUP / SUBGROUP * 16u * SUB_ROWS>>(&memory, 0);
  let out_vectors = bufferView<array<vec4<f32>, WORKGROUP / SUBGROUP * 4u * SUB_ROWS>>(&memory, 0);
  //@ unroll i in 0..TOKEN_MATRICES
  //@ unroll j in 0..ROW_MATRICES
  subgroupMatrixStore<row_major>(out_floats, team * 16u * SUB_ROWS + $ju * 16u, sum$i_$j, SUB_ROWS);
  //@ end
  workgroupBarrier();
  for (var quad = lane; quad < 4u * SUB_ROWS; quad += SUBGROUP) {
    let token = first_token + team_token + $iu * 16u + quad / (SUB_ROWS / 4u);
    let row = first_row + team_row + quad % (SUB_ROWS / 4u) * 4u;
    if (token <= last_token && row < params.rows) {
      let sums = out_vectors[team * 4u * SUB_ROWS + quad] * x_scale[token];
      var results: array<f32, ROWS>;
      //@ unroll r in 0..4
      results[$r] = sums[$r] + bias_at(min(row + $ru, params.rows - 1u));
      //@ end
      output(row, token, results, output_load(row, token));
    }
  }
  workgroupBarrier();
  //@ end
}
