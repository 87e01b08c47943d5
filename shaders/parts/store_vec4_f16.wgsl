// Rows of f16 to write, whose length and offsets are multiples of 4. Values beyond f16 saturate; NaN stays.
var<storage, read_write> $name: array<vec2<u32>>;   // (rows, channels) f16, four in two words
fn $name_store(at: u32, i: u32, v: vec4<f32>) {
  let c = select(v, clamp(v, vec4<f32>(-65504.0), vec4<f32>(65504.0)), abs(v) > vec4<f32>(65504.0));
  $name[at / 4u + i] = vec2<u32>(pack2x16float(c.xy), pack2x16float(c.zw));
}
