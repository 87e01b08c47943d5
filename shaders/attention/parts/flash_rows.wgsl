// Rows of the flash kernels. A row is one head of one query; the rows of a KV head are ordered by query, then head.
// Parts: problem, lengths_*, adjust_*.
struct FlashRow {
  i: u32,                // query
  h: u32,                // head
  first: u32, end: u32,  // keys that it sees
}

fn flash_ratio() -> u32 { return params.heads / params.kv_heads; }
fn flash_count() -> u32 { return query_count() * flash_ratio(); }
fn flash_row(b: u32, kv_head: u32, row: u32) -> FlashRow {
  let r = min(row, flash_count() - 1u);
  let i = r / flash_ratio();
  return FlashRow(i, kv_head * flash_ratio() + r % flash_ratio(), first_key(b, i), end_key(b, i));
}
fn flash_query(b: u32, row: FlashRow) -> u32 { return b * params.q_batch + row.h * params.q_head + row.i * params.q_row; }
fn flash_output(b: u32, row: FlashRow) -> u32 { return b * params.o_batch + row.h * params.o_head + row.i * params.o_row; }

// The keys that any of `count` rows sees, from `row` on: begin and end.
fn flash_keys(b: u32, row: u32, count: u32) -> vec2<u32> {
  return vec2<u32>(first_key(b, row / flash_ratio()), end_key(b, (min(row + count, flash_count()) - 1u) / flash_ratio()));
}
fn flash_score(score: f32, b: u32, row: FlashRow, j: u32) -> f32 {
  return select(LOWEST, adjust(score, b, row.h, row.i, j), (j >= row.first) & (j < row.end));
}
