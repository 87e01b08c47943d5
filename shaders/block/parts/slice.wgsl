// The end of a workgroup that has computed some columns' worth of a projection's input: W[:, its columns] . values, for all rows of W.
// What workgroups leave are sums that the next reader adds up (source_sums). A team of LANES invocations takes every TEAMS-th row, BATCH of them at a
// time; the first are loaded long before the values are there.                                                      reference.linear
// Workgroup memory: 4 * COLUMNS.   Options: ROWS, STRIDE (ROWS padded to 16), COLUMNS (of a slice), LANES (COLUMNS / 16, rounded up to a power of two),
// LANE_BITS = log2(LANES), BATCH, BATCHES, WORKGROUP; parts: weights_* or codes_* and scales_*, products_*, bias_*.
const TEAMS = WORKGROUP / LANES;
var<storage, read_write> sums: array<f32>;       // (slices, STRIDE) f32
var<workgroup> values: array<f32, COLUMNS>;
//@ unroll r in 0..BATCH
var<private> code$r: Codes;
var<private> scales$r: Scales;
//@ end
fn row_of(n: u32, index: u32) -> u32 { return n * TEAMS + index / LANES; }
fn chunk_of(number: u32, index: u32) -> u32 { return number * (COLUMNS / 16u) + min(index % LANES, COLUMNS / 16u - 1u); }
fn fetch(number: u32, batch: u32, index: u32) {
  //@ unroll r in 0..BATCH
  code$r = codes_load(min(row_of(batch * BATCH + $ru, index), ROWS - 1u), chunk_of(number, index));
  scales$r = scales_load(min(row_of(batch * BATCH + $ru, index), ROWS - 1u), chunk_of(number, index));
  //@ end
}
fn project(number: u32, index: u32) {            // slice `number`, whose values are there
  workgroupBarrier();
  for (var first = 0u; first < COLUMNS / 4u; first += WORKGROUP) {
    let i = min(first + index, COLUMNS / 4u - 1u);
    input_put(i, vec4<f32>(values[4u * i], values[4u * i + 1u], values[4u * i + 2u], values[4u * i + 3u]), first + index < COLUMNS / 4u);
  }
  workgroupBarrier();
  let given = input_get(min(index % LANES, COLUMNS / 16u - 1u), index % LANES < COLUMNS / 16u);
  for (var batch = 0u; batch < BATCHES; batch++) {
    //@ unroll r in 0..BATCH
    let row$r = row_of(batch * BATCH + $ru, index);
    var sum$r = product(code$r, scales_affine(scales$r, min(row$r, ROWS - 1u), chunk_of(number, index)), given, 0.0);
    //@ end
    if (batch + 1u < BATCHES) { fetch(number, batch + 1u, index); }
    //@ unroll r in 0..BATCH
    //@ unroll d in 0..LANE_BITS
    sum$r += subgroupShuffleXor(sum$r, 1u << $du);
    //@ end
    if (index % LANES == 0u && row$r < ROWS) {
      if (number == 0u) { sum$r += bias_at(row$r); }
      sums[number * STRIDE + row$r] = sum$r;
    }
    //@ end
  }
}
