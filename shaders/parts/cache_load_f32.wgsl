// The KV cache in f32, for reading four channels at a time.
var<storage, read> keys: array<vec4<f32>>;           // (KV_HEADS, capacity, HEAD_DIM) f32
var<storage, read> values: array<vec4<f32>>;         // (KV_HEADS, capacity, HEAD_DIM) f32
fn cache_capacity() -> u32 { return arrayLength(&keys) / (KV_HEADS * HEAD_DIM / 4u); }
fn keys_load(i: u32) -> vec4<f32> { return keys[i]; }
fn values_load(i: u32) -> vec4<f32> { return values[i]; }
