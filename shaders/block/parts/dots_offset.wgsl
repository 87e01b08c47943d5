// Int8 dot products in tiles where 32 columns share a scale and an offset: w = scale * code + offset, and the offset meets the sum of x.
// Options: TILE_ROWS, TILE_TOKENS, BLOCKS, BUFFERS.
// Workgroup memory: 8 * BUFFERS * BLOCKS * (TILE_ROWS + TILE_TOKENS).
const CENTRE = 0u;
struct Factors { scale: vec4<f32>, offset: vec4<f32> }
var<workgroup> w_scales: array<array<array<vec4<f32>, TILE_ROWS / 4u>, BLOCKS>, BUFFERS>;
var<workgroup> w_offsets: array<array<array<vec4<f32>, TILE_ROWS / 4u>, BLOCKS>, BUFFERS>;
var<workgroup> x_scales: array<array<array<vec4<f32>, TILE_TOKENS / 4u>, BLOCKS>, BUFFERS>;
var<workgroup> x_totals: array<array<array<vec4<f32>, TILE_TOKENS / 4u>, BLOCKS>, BUFFERS>;
fn w_factors_store(buffer: u32, chunk: u32, row: u32, affine: vec2<f32>) {
  if (chunk % 2u == 0u) {
    w_scales[buffer][chunk / 2u][row / 4u][row % 4u] = affine.x;
    w_offsets[buffer][chunk / 2u][row / 4u][row % 4u] = affine.y;
  }
}
fn x_factors_store(buffer: u32, block: u32, token: u32, unit: vec2<f32>) {
  x_scales[buffer][block][token / 4u][token % 4u] = unit.x;
  x_totals[buffer][block][token / 4u][token % 4u] = unit.y;
}
fn w_factors(buffer: u32, block: u32, quad: u32) -> Factors { return Factors(w_scales[buffer][block][quad], w_offsets[buffer][block][quad]); }
fn x_units4(buffer: u32, block: u32, quad: u32) -> vec4<f32> { return x_scales[buffer][block][quad]; }
fn x_totals4(buffer: u32, block: u32, quad: u32) -> vec4<f32> { return x_totals[buffer][block][quad]; }
fn dots_add(
  sum: vec4<f32>, factors: Factors, unit: f32, total: f32, a0: vec4<u32>, a1: vec4<u32>, a2: vec4<u32>, a3: vec4<u32>, xa: vec4<u32>,
  b0: vec4<u32>, b1: vec4<u32>, b2: vec4<u32>, b3: vec4<u32>, xb: vec4<u32>
) -> vec4<f32> {
  let dots = vec4<i32>(dot16(b0, xb, dot16(a0, xa, START)), dot16(b1, xb, dot16(a1, xa, START)), dot16(b2, xb, dot16(a2, xa, START)), dot16(b3, xb, dot16(a3, xa, START)));
  return fma(floats(dots), factors.scale * unit, fma(factors.offset, vec4<f32>(total), sum));
}
