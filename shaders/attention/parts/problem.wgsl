// The numbers of an attention problem, shared by all its kernels, and which keys a query sees.        reference.visible
// Strides are in elements; left and right: keys seen before and after a query's own position, OPEN for all.
// Options: HEAD_DIM, VALUE_DIM (0 where a kernel reads no rows), SOFTCAP (for adjust_terms); parts: lengths_*.

struct Params {
  batch: u32, heads: u32, kv_heads: u32, queries: u32, keys: u32,
  q_batch: u32, q_head: u32, q_row: u32,
  k_batch: u32, k_head: u32, k_row: u32,
  v_batch: u32, v_head: u32, v_row: u32,
  o_batch: u32, o_head: u32, o_row: u32,
  k_scales: u32, v_scales: u32,
  mask_batch: u32, mask_head: u32, mask_row: u32, mask_column: u32, mask_first: u32,
  left: i32, right: i32, bottom_right: u32,
  scale: f32, softcap: f32,
  splits: u32,
  first_group: u32,      // workgroups that other dispatches compute: a long one is cut
}
var<uniform> params: Params;

const WIDTH = (HEAD_DIM + 3u) / 4u;              // vec4s in a row of queries or keys
const VALUE_WIDTH = (VALUE_DIM + 3u) / 4u;       // vec4s in a row of values or outputs
const LOWEST = -3.4028234e38;                    // the score of a key that is not seen; infinities are not portable
const LOG2E = 1.4426950408889634;

// A score's limits; NaN stays, so that who gave one sees it. (Comparisons are such everywhere that it is not taken for a hidden key.)
fn saturated(x: f32, most: f32) -> f32 { return select(x, clamp(x, -most, most), abs(x) > most); }
fn key_position(b: u32, i: u32) -> i32 { return i32(i) + select(0, i32(key_count(b)) - i32(query_count()), params.bottom_right != 0u); }
fn first_key(b: u32, i: u32) -> u32 { return u32(clamp(key_position(b, i) - params.left, 0, i32(key_count(b)))); }
fn end_key(b: u32, i: u32) -> u32 { return u32(clamp(key_position(b, i) + params.right + 1, 0, i32(key_count(b)))); }

// Where a mask has the entry of a key; the mask begins with column mask_first. Strides of 0 broadcast. Always within the mask: what is read
// for rows and keys beyond the problem's, or before the mask, does not count.
fn mask_index(b: u32, h: u32, i: u32, j: u32) -> u32 {
  let column = max(min(j, params.keys - 1u), params.mask_first) - params.mask_first;
  return b * params.mask_batch + h * params.mask_head + min(i, params.queries - 1u) * params.mask_row + column * params.mask_column;
}
