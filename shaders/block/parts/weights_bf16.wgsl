// bf16: the upper half of an f32.
fn weights_pair(word: u32) -> vec2<f32> { return bitcast<vec2<f32>>(vec2<u32>(word << 16u, word & 0xffff0000u)); }
