// New rows into a quantised KV cache, eight channels at a time: place and source are row numbers. The first of each eight units writes two scales.
// Holes: name, width, scales (the word where the scales begin); parts: rows_* as new_$name, kv_encode, kv_encode_*.
var<storage, read_write> $name: array<u32>;      // (rows, $width padded to 32) codes, 32 / KV_BITS a word; (rows, blocks padded to 2) f16 scales, two a word
const $name_BLOCKS = ($width + 31u) / 32u;
const $name_UNITS = $name_BLOCKS * 4u;
fn $name_new(source: u32, i: u32) -> vec4<f32> {
  if (i >= ($width + 3u) / 4u) { return vec4<f32>(); }
  return clamp(new_$name_load(source * $width, i), vec4<f32>(-KV_LIMIT), vec4<f32>(KV_LIMIT));
}
fn $name_scale(source: u32, block: u32) -> f32 {
  var high = 0.0;
  for (var i = 0u; i < 8u; i++) { high = kv_high(high, $name_new(source, block * 8u + i)); }
  return kv_scale(high);
}
fn $name_append(place: u32, source: u32, c: u32) {
  let scale = $name_scale(source, c / 4u);
  let inverse = kv_inverse(scale);
  let a = kv_codes($name_new(source, c * 2u), inverse);
  let b = kv_codes($name_new(source, c * 2u + 1u), inverse);
  let at = (place * $name_UNITS + c) * (KV_BITS / 4u);
  if (KV_BITS == 8u) {
    $name[at] = a;
    $name[at + 1u] = b;
  } else {
    $name[at] = a | (b << 4u);
  }
  if (c % 8u == 0u) {
    let next = $name_scale(source, c / 4u + 1u); // behind the last block: 0
    $name[$scales + place * (($name_BLOCKS + 1u) / 2u) + c / 8u] = kv_half(scale) | (kv_half(next) << 16u);
  }
}
