// The most likely token (the lowest id of equals) becomes the next step's input: greedy decoding without the host.      llm/sample.py
// One workgroup. It also moves the step on by one position and notes the token in a ring for the host to read later.
// Workgroup memory: 8 * WORKGROUP.   Options: WORKGROUP (a power of two), TOKENS_AT: word of the step buffer where token ids begin; parts: order.

struct Params { vocab: u32, ring: u32 }

const NONE = 0xffffffffu;                        // a logit is NaN, or all are -infinity

var<uniform> params: Params;
var<storage, read> logits: array<vec4<u32>>;     // (vocab, padded to 4) the bits of f32
var<storage, read_write> state: array<u32>;      // (words of the step buffer) position, count, ..., token ids
var<storage, read_write> history: array<u32>;    // (ring) the token at position p is at p % ring
var<workgroup> best_key: array<u32, WORKGROUP>;
var<workgroup> best_id: array<u32, WORKGROUP>;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) index: u32) {
  var key = ORDER_LOWEST - 1u;
  var id = NONE;
  let quads = (params.vocab + 3u) / 4u;
  for (var first = index; first < quads; first += 4u * WORKGROUP) {
    //@ unroll n in 0..4
    let v$n = logits[min(first + $nu * WORKGROUP, quads - 1u)];   // four loads under way: one after the other they would take as long each
    //@ end
    //@ unroll n in 0..4
    //@ unroll c in 0..4
    {
      let candidate = order_key(v$n[$c]);
      let its_id = (first + $nu * WORKGROUP) * 4u + $cu;
      if (its_id < params.vocab && candidate > key) {
        key = candidate;
        id = its_id;
      }
    }
    //@ end
    //@ end
  }
  best_key[index] = key;
  best_id[index] = id;
  for (var half = WORKGROUP / 2u; half > 0u; half >>= 1u) {
    workgroupBarrier();
    if (index < half) {
      let other = best_key[index + half];
      let other_id = best_id[index + half];
      if (other > best_key[index] || (other == best_key[index] && other_id < best_id[index])) {
        best_key[index] = other;
        best_id[index] = other_id;
      }
    }
  }
  if (index == 0u) {
    let position = state[0] + state[1];
    history[position % params.ring] = select(best_id[0], NONE, best_key[0] == ORDER_NAN);
    state[0] = position;
    state[1] = 1u;
    state[TOKENS_AT] = min(best_id[0], params.vocab - 1u);
  }
}
