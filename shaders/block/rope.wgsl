// Rotate pairs of channels of each head by a token's angles; channels from ROTARY on pass through.            reference.apply_rope
// Each invocation makes four channels of one head of one token. Pair i is (2i, 2i + 1) when INTERLEAVED, else (i, i + ROTARY / 2).
// Workgroup memory: none.
// Options: HEAD_DIM, ROTARY, INTERLEAVED, WORKGROUP; parts: rows_* as x, store_* as out.

struct Params { tokens: u32, heads: u32, positions: u32, table: u32 }

var<uniform> params: Params;                     // positions: how many there are, repeated for all tokens; table: its rows
var<storage, read> positions: array<u32>;        // (positions) rows of the table
var<storage, read> cosines: array<f32>;          // (table, ROTARY / 2) f32
var<storage, read> sines: array<f32>;            // (table, ROTARY / 2) f32

const WIDTH = (HEAD_DIM + 3u) / 4u;
const HALF = ROTARY / 2u;

override WORKGROUP: u32 = 64;

fn channel(at: u32, c: u32) -> f32 {
  let v = x_load(at, c / 4u);
  return v[c % 4u];
}

fn rotated(at: u32, turn: u32, c: u32, v: f32) -> f32 {
  if (c >= ROTARY) { return v; }
  let pair = select(c % HALF, c / 2u, INTERLEAVED);
  let second = select(c >= HALF, c % 2u == 1u, INTERLEAVED);
  let apart = select(HALF, 1u, INTERLEAVED);
  let other = channel(at, select(c + apart, c - apart, second));
  return v * cosines[turn + pair] + select(-other, other, second) * sines[turn + pair];
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let i = (group.x + group.y * groups.x) * WORKGROUP + index;   // linear: (token, head, WIDTH)
  let row = i / WIDTH;
  if (row >= params.tokens * params.heads) { return; }
  let c = i % WIDTH;
  let at = row * HEAD_DIM;
  let turn = min(positions[row / params.heads % params.positions], params.table - 1u) * HALF;
  var v = x_load(at, c);
  for (var k = 0u; k < 4u; k++) { v[k] = rotated(at, turn, c * 4u + k, v[k]); }
  out_store(at, c, v);
}
