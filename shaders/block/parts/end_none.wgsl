// Nothing is left to do when the outputs of a token are there.
fn output_ahead(first_row: u32, index: u32) {}
fn output_end(first_row: u32, token: u32, index: u32) {}
