// y = epilogue(W . norm(x)) for one token on a GPU: x, normed, is put into workgroup memory once, then into registers, and the rows of W go by.
//                                                                        reference.linear, linear_int8, rms_norm, swiglu, apply_rope
// A workgroup computes GROUP_ROWS rows: TEAMS teams of LANES invocations, BATCHES times BATCH rows each. A lane takes the columns of CHUNKS chunks
// of 16, the same for all rows, so that x is read from memory once a workgroup: at a few rows a workgroup that would be most of the traffic.
// The norm's scale is one number, applied after the dot products. Sums of subgroups meet in workgroup memory behind one barrier.
// Workgroup memory: 4 * GROUP_ROWS * PARTS + 4 * WORKGROUP / SUBGROUP, and that of products_*, source_* and heads_norm.
// Options: COLUMNS (padded to 16), LANES, TEAMS, BATCH, BATCHES, CHUNKS = COLUMNS / 16 / LANES (rounded up), ROWS = 4, PAIRS = 2, QUADS = 1, WORKGROUP, SUBGROUP (1: none);
// parts: step, weights_* or codes_* and scales_*, source_*, products_*, sharers_*, norm_*, bias_*, token_*, heads_*, output_*, end_none or cache_store_*.

struct Params { columns: u32, rows: u32, x_stride: u32, y_stride: u32, first_row: u32, eps: f32 }

const GROUP_ROWS = TEAMS * BATCH * BATCHES;
const SHARERS = min(LANES, SUBGROUP);            // lanes of one subgroup that have a row in common
const PARTS = LANES / SHARERS;                   // sums that make up a row
const HEAD_SLOTS = GROUP_ROWS / 4u;

var<uniform> params: Params;                     // rows: of this piece of W, whose row 0 is row first_row of the whole
var<storage, read> x: array<vec4<f32>>;          // (tokens, x_stride) f32; columns beyond `columns` are 0

var<workgroup> sums: array<f32, GROUP_ROWS * PARTS>;
var<workgroup> square_sums: array<f32, WORKGROUP / SUBGROUP>;

fn team_add(value: f32) -> f32 { return value; }     // norm_scale gets sums that are complete

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let lane = index % LANES;
  let first_row = (group.x + group.y * groups.x) * GROUP_ROWS;               // linear: there may be more than 65,535 groups
  let team_row = index / LANES * (BATCH * BATCHES);
  //@ unroll c in 0..CHUNKS
  let chunk$c = min(lane + $cu * LANES, COLUMNS / 16u - 1u);
  //@ end
  // Weights are loaded a batch ahead: the first are under way before x is there.
  //@ unroll r in 0..BATCH
  //@ unroll c in 0..CHUNKS
  var codes$r_$c = codes_load(min(first_row + team_row + $ru, params.rows - 1u), chunk$c);
  var scales$r_$c = scales_load(min(first_row + team_row + $ru, params.rows - 1u), chunk$c);
  //@ end
  //@ end
  output_ahead(first_row, index);
  source_ahead(index);
  let x_at = input_token(0u) * (params.x_stride / 4u);
  var squares = 0.0;
  for (var first = 0u; first < COLUMNS / 4u; first += WORKGROUP) {
    let i = min(first + index, COLUMNS / 4u - 1u);
    let inside = first + index < COLUMNS / 4u;
    let v = source_load(x_at + i, inside && first_row == 0u);
    squares += select(0.0, norm_square(v), inside);
    input_put(i, norm_apply4(v, i), inside);
  }
  // An invocation ends four rows; what it needs for that is loaded now.
  let quad = min(index, HEAD_SLOTS - 1u);
  let row = first_row + quad * 4u;
  let loaded = output_load(row, 0u);
  let bias = vec4<f32>(
    bias_at(min(row, params.rows - 1u)), bias_at(min(row + 1u, params.rows - 1u)), bias_at(min(row + 2u, params.rows - 1u)), bias_at(min(row + 3u, params.rows - 1u)));
  let group_squares = neighbours_add(squares);
  if (index % SUBGROUP == 0u) { square_sums[index / SUBGROUP] = group_squares; }
  workgroupBarrier();
  //@ unroll c in 0..CHUNKS
  let input$c = input_get(chunk$c, lane + $cu * LANES < COLUMNS / 16u);
  //@ end
  for (var batch = 0u; batch < BATCHES; batch++) {
    let batch_row = team_row + batch * BATCH;
    //@ unroll r in 0..BATCH
    let row$r = min(first_row + batch_row + $ru, params.rows - 1u);
    let next$r = min(first_row + batch_row + BATCH + $ru, params.rows - 1u);
    var sum$r = 0.0;
    //@ unroll c in 0..CHUNKS
    let now$r_$c = codes$r_$c;
    let affine$r_$c = scales_affine(scales$r_$c, row$r, chunk$c);
    //@ end
    //@ end
    if (batch + 1u < BATCHES) {
      //@ unroll r in 0..BATCH
      //@ unroll c in 0..CHUNKS
      codes$r_$c = codes_load(next$r, chunk$c);
      scales$r_$c = scales_load(next$r, chunk$c);
      //@ end
      //@ end
    }
    //@ unroll r in 0..BATCH
    //@ unroll c in 0..CHUNKS
    sum$r = product(now$r_$c, affine$r_$c, input$c, sum$r);
    //@ end
    let shared$r = sharers_add(sum$r);
    //@ end
    if (index % SHARERS == 0u) {
      //@ unroll r in 0..BATCH
      sums[(batch_row + $ru) * PARTS + lane / SHARERS] = shared$r;
      //@ end
    }
  }
  workgroupBarrier();
  var total = 0.0;
  for (var i = 0u; i < WORKGROUP / SUBGROUP; i++) { total += square_sums[i]; }
  let scale = norm_scale(total);
  var results: array<f32, ROWS>;
  //@ unroll r in 0..4
  {
    var sum = 0.0;
    for (var i = 0u; i < PARTS; i++) { sum += sums[(quad * 4u + $ru) * PARTS + i]; }
    results[$r] = sum * scale + bias[$r];
  }
  //@ end
  let gain = head_gain(row, quad, index < HEAD_SLOTS, results);
  //@ unroll r in 0..4
  results[$r] *= gain * head_weight(min(row + $ru, params.rows - 1u));
  //@ end
  if (index < HEAD_SLOTS && row < params.rows) { output(row, 0u, results, loaded); }
  output_end(first_row, 0u, index);
}
