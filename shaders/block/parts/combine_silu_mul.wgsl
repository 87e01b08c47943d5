// The gate and what it lets through.        reference.swiglu
fn combine(a: f32, b: f32) -> f32 { return a / (1.0 + exp(-a)) * b; }
