// Numbers of 32 bits in the order of the floats they stand for, so that thresholds can be searched for bit by bit.
// 0 and -0 are one; NaN is above all. Denormals keep their places: nothing computes with them.
// Workgroup memory: none.

const ORDER_NAN = 0xffffffffu;
const ORDER_INFINITY = 0xff800000u;
const ORDER_LOWEST = 0x00800000u;                // of the lowest finite number: -infinity is below

fn order_key(bits: u32) -> u32 {
  let magnitude = bits & 0x7fffffffu;
  let key = select(bits | 0x80000000u, ~bits, (bits >> 31u) == 1u);
  return select(select(key, 0x80000000u, magnitude == 0u), ORDER_NAN, magnitude > 0x7f800000u);
}

fn order_value(key: u32) -> f32 {
  return bitcast<f32>(select(key & 0x7fffffffu, ~key, key < 0x80000000u));
}
