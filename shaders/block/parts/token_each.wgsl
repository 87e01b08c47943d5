// Token t of the output comes from token t of the input.
fn input_token(token: u32) -> u32 { return token; }
