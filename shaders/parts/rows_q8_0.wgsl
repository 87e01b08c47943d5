// Rows of a KV cache in Q8_0: `at` is the row's offset in elements, i the number of the vec4; what is beyond the row is finite.
// Holes: name, width, scales (the word where the scales begin).
var<storage, read> $name: array<u32>;            // (rows, $width padded to 32) int8, four a word; (rows, blocks padded to 2) f16 scales, two a word
const $name_STRIDE = ($width + 31u) / 32u * 32u;
fn $name_load(at: u32, i: u32) -> vec4<f32> {
  let scale = unpack2x16float($name[$scales + at / $name_STRIDE * (($name_STRIDE + 32u) / 64u) + i / 16u] >> ((i * 2u) & 16u)).x;
  return vec4<f32>(unpack4xI8($name[at / 4u + i])) * scale;
}
