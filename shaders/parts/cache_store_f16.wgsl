// The KV cache in f16, two channels a word, for writing; needs no f16 arithmetic.
var<storage, read_write> keys: array<u32>;           // (KV_HEADS, capacity, HEAD_DIM) f16
var<storage, read_write> values: array<u32>;         // (KV_HEADS, capacity, HEAD_DIM) f16
fn cache_row(head: u32, position: u32) -> u32 { return (head * (arrayLength(&keys) / (KV_HEADS * HEAD_DIM / 2u)) + position) * (HEAD_DIM / 2u); }
fn keys_store(i: u32, v: vec2<f32>) { keys[i] = pack2x16float(cache_saturated(v)); }
fn values_store(i: u32, v: vec2<f32>) { values[i] = pack2x16float(cache_saturated(v)); }
fn output_ahead(first_row: u32, index: u32) {}
fn output_end(first_row: u32, token: u32, index: u32) {}
fn cache_saturated(v: vec2<f32>) -> vec2<f32> { return select(v, clamp(v, vec2<f32>(-65504.0), vec2<f32>(65504.0)), abs(v) > vec2<f32>(65504.0)); }   // NaN stays
