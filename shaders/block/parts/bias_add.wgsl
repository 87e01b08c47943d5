// A bias a row, added after the norm's scale.
var<storage, read> bias: array<f32>;             // (rows of the whole matrix) f32
fn bias_at(row: u32) -> f32 { return bias[params.first_row + row]; }
