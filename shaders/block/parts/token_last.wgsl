// The one token of the output comes from the last token of the step: logits.
fn input_token(token: u32) -> u32 { return step.count - 1u; }
