// ALiBi (Press et al. 2022): a penalty that grows with the distance of the key.
var<storage, read> alibi_slopes: array<f32>;     // (heads)
fn alibi(b: u32, h: u32, i: u32, j: u32) -> f32 { return alibi_slopes[h] * f32(abs(key_position(b, i) - i32(j))); }
