// Rows of a KV cache in Q4_0: `at` is the row's offset in elements, i the number of the vec4; what is beyond the row is finite.
// Holes: name, width, scales (the word where the scales begin).
var<storage, read> $name: array<u32>;            // (rows, $width padded to 32) codes of 4 bits, eight a word; (rows, blocks padded to 2) f16 scales, two a word
const $name_STRIDE = ($width + 31u) / 32u * 32u;
fn $name_load(at: u32, i: u32) -> vec4<f32> {
  let scale = unpack2x16float($name[$scales + at / $name_STRIDE * (($name_STRIDE + 32u) / 64u) + i / 16u] >> ((i * 2u) & 16u)).x;
  let codes = ($name[at / 8u + i / 2u] >> ((i * 4u) & 4u)) & 0x0f0f0f0fu;        // channels 0..3 of eight in the low nibbles of the bytes, 4..7 in the high
  return (vec4<f32>(unpack4xI8(codes)) - 8.0) * scale;
}
