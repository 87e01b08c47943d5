// Put new keys and values behind those of the cache, converting as it stores them.                          attention/kv_cache.py
// Each invocation copies four channels of one key or value.   Workgroup memory: none.
// Options: HEAD_DIM, VALUE_DIM, WORKGROUP; parts: step, rows_* as new_keys and new_values, store_vec4_* as keys and values.

struct Params { batch: u32, kv_heads: u32, capacity: u32, rows: u32 }

var<uniform> params: Params;                     // rows: positions between two sequences of the new keys

const WIDTH = (HEAD_DIM + 3u) / 4u;
const VALUE_WIDTH = (VALUE_DIM + 3u) / 4u;

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let i = (group.x + group.y * groups.x) * WORKGROUP + index;   // linear: (batch, new position, KV head, WIDTH then VALUE_WIDTH)
  let c = i % (WIDTH + VALUE_WIDTH);
  let row = i / (WIDTH + VALUE_WIDTH);
  let h = row % params.kv_heads;
  let t = row / params.kv_heads % step.count;
  let b = row / params.kv_heads / step.count;
  if (b >= params.batch) { return; }
  let source = (b * params.rows + t) * params.kv_heads + h;
  let place = (b * params.kv_heads + h) * params.capacity + step.position + t;
  if (c < WIDTH) {
    keys_store(place * WIDTH * 4u, c, new_keys_load(source * HEAD_DIM, c));
  } else {
    values_store(place * VALUE_WIDTH * 4u, c - WIDTH, new_values_load(source * VALUE_DIM, c - WIDTH));
  }
}
