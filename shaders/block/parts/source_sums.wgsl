// x is what is in memory and sums that are still to be added to it: each workgroup adds them up, one writes the result for those who come later.
// Where sums are many, groups of invocations take SUMS_EACH of them each and meet in workgroup memory: all loads are under way at once.
// Workgroup memory: 16 * SUM_GROUPS * SUM_WIDTH.
// Options: SUMS, SUM_GROUPS, SUMS_EACH = SUMS / SUM_GROUPS, rounded up, SUM_WIDTH = x_stride / 4 (1 with one group), WORKGROUP.
var<storage, read> sums_pending: array<vec4<f32>>;   // (SUMS, x_stride) f32
var<storage, read_write> x_settled: array<vec4<f32>>; // (1, x_stride) f32
var<workgroup> sums_of_groups: array<vec4<f32>, SUM_GROUPS * SUM_WIDTH>;
fn source_part(first: u32, i: u32) -> vec4<f32> {
  //@ unroll n in 0..SUMS_EACH
  let part$n = sums_pending[min(first + $nu, SUMS - 1u) * (params.x_stride / 4u) + i];
  //@ end
  var v = vec4<f32>();
  //@ unroll n in 0..SUMS_EACH
  if (first + $nu < SUMS) { v += part$n; }
  //@ end
  return v;
}
fn source_ahead(index: u32) {
  if (SUM_GROUPS > 1u) {
    for (var n = index; n < SUM_GROUPS * SUM_WIDTH; n += WORKGROUP) { sums_of_groups[n] = source_part(n / SUM_WIDTH * SUMS_EACH, n % SUM_WIDTH); }
    workgroupBarrier();
  }
}
fn source_load(i: u32, keeps: bool) -> vec4<f32> {
  var v = x[i];
  if (SUM_GROUPS > 1u) {
    for (var g = 0u; g < SUM_GROUPS; g++) { v += sums_of_groups[g * SUM_WIDTH + i]; }
  } else {
    v += source_part(0u, i);
  }
  if (keeps) { x_settled[i] = v; }
  return v;
}
