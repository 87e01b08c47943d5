// y = epilogue(W . x) for many tokens, x rounded to int8 by `int8.wgsl`: tiles of codes go through workgroup memory.        reference.linear_int8
// A workgroup computes TILE_ROWS rows for TILE_TOKENS tokens, an invocation 4 * ROW_QUADS rows for 4 * TOKEN_QUADS tokens, both in fours.
// A step takes BLOCKS blocks of 32 columns; while one is multiplied the next is stored and the one after fetched. dot4I8Packed multiplies
// four codes of W by four of x; a block's sum starts at the bits of 1.5 * 2^23, so that as bits of a float it needs no conversion.
// Fours of rows and of tokens are read by neighbouring invocations; W's are swizzled so that the writes of a row's chunks do not share banks.
// Workgroup memory: 128 * BUFFERS * BLOCKS * (W_WIDTH + X_WIDTH).
// Options: TILE_ROWS, TILE_TOKENS, ROW_QUADS, TOKEN_QUADS, BLOCKS, BUFFERS = 2, ROWS = 4, QUADS = 1, PAIRS = 2, W_LOADS = 2 * BLOCKS * TILE_ROWS / WORKGROUP,
// X_LOADS = 2 * BLOCKS * TILE_TOKENS / WORKGROUP, UNIT_LOADS = BLOCKS * TILE_TOKENS / WORKGROUP (rounded up), WORKGROUP = ACROSS * DOWN, a multiple of 32,
// ACROSS of 8; parts: step, codes_* and scales_*, dots_*, bias_*, heads_plain, output_*, end_none or cache_store_*.

struct Params { columns: u32, rows: u32, x_stride: u32, y_stride: u32, first_row: u32, eps: f32 }

const ACROSS = TILE_ROWS / (4u * ROW_QUADS);     // invocations side by side along the rows
const DOWN = TILE_TOKENS / (4u * TOKEN_QUADS);
const W_WIDTH = TILE_ROWS / 4u + 1u;             // fours, and one that moves the next row's to other banks
const X_WIDTH = TILE_TOKENS / 4u + 2u;
const CHUNKS = 2u * BLOCKS;                      // of 16 columns, a step
const W_SWIZZLE = 2u * (BLOCKS - 1u);           // the odd width does it where there is one block
const UNITS = BLOCKS * TILE_TOKENS;

var<uniform> params: Params;                     // rows: of this piece of W, whose row 0 is row first_row of the whole; columns: a multiple of 32
var<storage, read> x: array<vec4<u32>>;          // (columns / 16, x_stride) sixteen int8, x_stride being tokens
var<storage, read> x_units: array<vec2<f32>>;    // (columns / 32, x_stride) of (unit, sum of the 32 values) f32
var<storage, read> x_scale: array<f32>;          // (tokens) f32

// By chunk, place in four, and four.
var<workgroup> w_tile: array<array<array<array<vec4<u32>, W_WIDTH>, 4>, CHUNKS>, BUFFERS>;
var<workgroup> x_tile: array<array<array<array<vec4<u32>, X_WIDTH>, 4>, CHUNKS>, BUFFERS>;

fn centred(codes: vec4<u32>) -> vec4<u32> {      // codes less CENTRE, byte by byte
  if (CENTRE == 0u) { return codes; }
  return ((codes | vec4<u32>(0x80808080u)) - vec4<u32>(CENTRE * 0x01010101u)) ^ vec4<u32>(0x80808080u);
}
fn dot16(a: vec4<u32>, b: vec4<u32>, start: i32) -> i32 {
  return dot4I8Packed(a.w, b.w) + (dot4I8Packed(a.z, b.z) + (dot4I8Packed(a.y, b.y) + (dot4I8Packed(a.x, b.x) + start)));
}
const START = 0x4b400000;
fn floats(sums: vec4<i32>) -> vec4<f32> { return bitcast<vec4<f32>>(sums) - vec4<f32>(12582912.0); }

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let first_token = group.z * TILE_TOKENS;
  if (first_token >= step.count) { return; }                                  // the chunk's unused end
  let first_row = (group.x + group.y * groups.x) * TILE_ROWS;
  let last_token = step.count - 1u;
  let team = index / 32u;                        // takes 8 invocations along the rows by 4 along the tokens
  let across = team % (ACROSS / 8u) * 8u + index / 2u % 8u;
  let down = team / (ACROSS / 8u) * 4u + index / 16u % 2u * 2u + index % 2u;
  //@ unroll u in 0..TOKEN_QUADS
  //@ unroll t in 0..4
  //@ unroll q in 0..ROW_QUADS
  var sum$u_$t_$q = vec4<f32>();
  //@ end
  //@ end
  //@ end
  let chunks = params.columns / 16u;
  let steps = (chunks + CHUNKS - 1u) / CHUNKS;
  //@ unroll n in 0..W_LOADS
  let row$n = (index + $nu * WORKGROUP) / CHUNKS;
  let chunk$n = (index + $nu * WORKGROUP) % CHUNKS;
  let w_place$n = (row$n / 4u) ^ (W_SWIZZLE * chunk$n);
  let source$n = min(first_row + row$n, params.rows - 1u);
  var code$n = codes_load(source$n, min(chunk$n, chunks - 1u));
  var scales$n = scales_load(source$n, min(chunk$n, chunks - 1u));
  //@ end
  //@ unroll n in 0..X_LOADS
  let token$n = (index + $nu * WORKGROUP) % TILE_TOKENS;
  let x_chunk$n = (index + $nu * WORKGROUP) / TILE_TOKENS;
  let x_at$n = min(first_token + token$n, last_token);
  var x$n = x[x_at$n + min(x_chunk$n, chunks - 1u) * params.x_stride];
  //@ end
  //@ unroll n in 0..UNIT_LOADS
  let unit_token$n = (index + $nu * WORKGROUP) % TILE_TOKENS;
  let unit_block$n = (index + $nu * WORKGROUP) / TILE_TOKENS;
  let unit_at$n = min(first_token + unit_token$n, last_token);
  var unit$n = x_units[unit_at$n + min(unit_block$n, chunks / 2u - 1u) * params.x_stride];
  //@ end
  for (var s = 0u; s <= steps; s++) {            // step s is stored, s + 1 fetched, s - 1 multiplied
    if (s < steps) {
      let b = s % BUFFERS;
      //@ unroll n in 0..W_LOADS
      w_tile[b][chunk$n][row$n % 4u][w_place$n] = centred(codes_ints(code$n));
      w_factors_store(b, chunk$n, row$n, scales_affine(scales$n, source$n, min(s * CHUNKS + chunk$n, chunks - 1u)));
      //@ end
      //@ unroll n in 0..X_LOADS
      x_tile[b][x_chunk$n][token$n % 4u][token$n / 4u] = x$n;
      //@ end
      //@ unroll n in 0..UNIT_LOADS
      if (index + $nu * WORKGROUP < UNITS) {
        let inside = 2u * (s * BLOCKS + unit_block$n) < chunks;                // beyond the columns: zero
        x_factors_store(b, unit_block$n, unit_token$n, select(vec2<f32>(), unit$n, inside));
      }
      //@ end
    }
    if (s + 1u < steps) {
      //@ unroll n in 0..W_LOADS
      code$n = codes_load(source$n, min((s + 1u) * CHUNKS + chunk$n, chunks - 1u));
      scales$n = scales_load(source$n, min((s + 1u) * CHUNKS + chunk$n, chunks - 1u));
      //@ end
      //@ unroll n in 0..X_LOADS
      x$n = x[x_at$n + min((s + 1u) * CHUNKS + x_chunk$n, chunks - 1u) * params.x_stride];
      //@ end
      //@ unroll n in 0..UNIT_LOADS
      unit$n = x_units[unit_at$n + min((s + 1u) * BLOCKS + unit_block$n, chunks / 2u - 1u) * params.x_stride];
      //@ end
    }
    if (s > 0u) {
      let b = (s - 1u) % BUFFERS;
      //@ unroll k in 0..BLOCKS
      {
        //@ unroll q in 0..ROW_QUADS
        let factors$q = w_factors(b, $ku, $qu * ACROSS + across);
        //@ unroll r in 0..4
        let w_a$q_$r = w_tile[b][2 * $k][$r][($qu * ACROSS + across) ^ (W_SWIZZLE * 2u * $ku)];
        let w_b$q_$r = w_tile[b][2 * $k + 1][$r][($qu * ACROSS + across) ^ (W_SWIZZLE * (2u * $ku + 1u))];
        //@ end
        //@ end
        //@ unroll u in 0..TOKEN_QUADS
        let units$u = x_units4(b, $ku, $uu * DOWN + down);
        let totals$u = x_totals4(b, $ku, $uu * DOWN + down);
        //@ unroll t in 0..4
        {
          let a = x_tile[b][2 * $k][$t][$uu * DOWN + down];
          let c = x_tile[b][2 * $k + 1][$t][$uu * DOWN + down];
          //@ unroll q in 0..ROW_QUADS
          sum$u_$t_$q = dots_add(
            sum$u_$t_$q, factors$q, units$u[$t], totals$u[$t],
            w_a$q_0, w_a$q_1, w_a$q_2, w_a$q_3, a, w_b$q_0, w_b$q_1, w_b$q_2, w_b$q_3, c);
          //@ end
        }
        //@ end
        //@ end
      }
      //@ end
    }
    workgroupBarrier();
  }
  //@ unroll u in 0..TOKEN_QUADS
  //@ unroll t in 0..4
  {
    let token = first_token + ($uu * DOWN + down) * 4u + $tu;
    if (token <= last_token) {
      let scale = x_scale[token];
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
