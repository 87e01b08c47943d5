// New rows into a KV cache of floats, a vec4 at a time: place and source are row numbers.
// Holes: name, width; parts: rows_* as new_$name, store_vec4_* as $name.
const $name_UNITS = ($width + 3u) / 4u;
fn $name_append(place: u32, source: u32, c: u32) { $name_store(place * $name_UNITS * 4u, c, new_$name_load(source * $width, c)); }
