// Put new keys and values behind those of the cache, converting as it stores them.                          attention/kv_cache.py
// Each invocation takes a unit of one key or value: four channels, or eight where they are quantised.   Workgroup memory: none.
// Options: HEAD_DIM, VALUE_DIM, WORKGROUP; parts: step, rows_* as new_keys and new_values, kv_append and store_vec4_*, or kv_append_blocks, kv_encode
// and kv_encode_*, as keys and values.

struct Params { batch: u32, kv_heads: u32, room: u32, rows: u32, scales: u32 }

var<uniform> params: Params;                     // room: positions between two heads; rows: positions between two sequences of the new keys

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let i = (group.x + group.y * groups.x) * WORKGROUP + index;   // linear: (batch, new position, KV head, units of keys then of values)
  let c = i % (keys_UNITS + values_UNITS);
  let row = i / (keys_UNITS + values_UNITS);
  let h = row % params.kv_heads;
  let t = row / params.kv_heads % step.count;
  let b = row / params.kv_heads / step.count;
  if (b >= params.batch) { return; }
  let source = (b * params.rows + t) * params.kv_heads + h;
  let place = (b * params.kv_heads + h) * params.room + step.position + t;
  if (c < keys_UNITS) { keys_append(place, source, c); } else { values_append(place, source, c - keys_UNITS); }
}
