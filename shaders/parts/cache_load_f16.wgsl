// The KV cache in f16, for reading four channels at a time; needs no f16 arithmetic.
var<storage, read> keys: array<vec2<u32>>;           // (KV_HEADS, capacity, HEAD_DIM) f16
var<storage, read> values: array<vec2<u32>>;         // (KV_HEADS, capacity, HEAD_DIM) f16
fn cache_capacity() -> u32 { return arrayLength(&keys) / (KV_HEADS * HEAD_DIM / 4u); }
fn keys_load(i: u32) -> vec4<f32> { let w = keys[i]; return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y)); }
fn values_load(i: u32) -> vec4<f32> { let w = values[i]; return vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y)); }
