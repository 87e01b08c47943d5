// The KV cache in f32, for writing two channels at a time.
var<storage, read_write> keys: array<vec2<f32>>;     // (KV_HEADS, capacity, HEAD_DIM) f32
var<storage, read_write> values: array<vec2<f32>>;   // (KV_HEADS, capacity, HEAD_DIM) f32
fn cache_row(head: u32, position: u32) -> u32 { return (head * (arrayLength(&keys) / (KV_HEADS * HEAD_DIM / 2u)) + position) * (HEAD_DIM / 2u); }
fn keys_store(i: u32, v: vec2<f32>) { keys[i] = v; }
fn values_store(i: u32, v: vec2<f32>) { values[i] = v; }
fn output_ahead(first_row: u32, index: u32) {}
fn output_end(first_row: u32, token: u32, index: u32) {}
