// f16; needs no f16 arithmetic.
fn weights_pair(word: u32) -> vec2<f32> { return unpack2x16float(word); }
