// The next token, drawn after temperature, top-k and top-p, becomes the next step's input: sampling without the host.      reference.candidates
// One workgroup. It also moves the step on by one position and notes the token in a ring for the host to read later.
// A border (the key of a logit, and among equals the id of the last token kept) is searched for in rounds: each measures what lies above 8 thresholds,
// by number of tokens for top-k (exact in f32 below 2^24) and by probability for top-p. From the second round on, an invocation reads a list of its own
// of what is still possible.
// The draw is Gumbel-max: the largest of logit / temperature + noise, the noise a function of seed, position and token id alone.
// Workgroup memory: 32 * WORKGROUP + 1096.
// Options: WORKGROUP (at least 32), TOKENS_AT: word of the step buffer where token ids begin; parts: order, threefry.

struct Params { vocab: u32, ring: u32, slots: u32 }

struct Sampling {
  inverse: f32,                                  // 1 / temperature
  reach: f32,                                    // logits further below the largest weigh nothing in f32
  top_p: f32,                                    // 1: no search
  top_k: u32,                                    // 0: no search
  seed: vec2<u32>,
}

const NONE = 0xffffffffu;                        // a logit is NaN, or all are -infinity
const LEADERS = 32u;
const LARGEST = 3.4028234e38;

var<uniform> params: Params;
var<uniform> sampling: Sampling;
var<storage, read> logits: array<vec4<u32>>;     // (vocab, padded to 4) the bits of f32
var<storage, read_write> state: array<u32>;      // (words of the step buffer) position, count, ..., token ids
var<storage, read_write> history: array<u32>;    // (ring) the token at position p is at p % ring
var<storage, read_write> kept: array<vec2<u32>>; // (slots / WORKGROUP, WORKGROUP) of (key, id): a column for each invocation; then the border

var<workgroup> top: atomic<u32>;
var<workgroup> shared_sums: array<vec4<u32>, 2 * WORKGROUP>;
var<workgroup> leading: array<vec4<u32>, 64>;    // 2 * LEADERS
var<workgroup> cuts: array<u32, 8>;
var<workgroup> busy: u32;                        // whether there is a next round
var<workgroup> first: u32;                       // whether it is the first of a search: cuts[0] is then low
var<workgroup> low: u32;                         // what is sought is in [low, high): at least `goal` lies from low on, less from high on
var<workgroup> high: u32;
var<workgroup> goal: f32;
var<workgroup> from_low: f32;
var<workgroup> from_high: f32;
var<workgroup> border: vec2<u32>;                // (key, id) of the last token kept

var<private> lane: u32;
var<private> position: u32;
var<private> top_key: u32;
var<private> limit: vec2<u32>;                   // the border found so far
var<private> floor_key: u32;                     // nothing below is possible
var<private> passes: u32;                        // so far
var<private> filled: u32;                        // of the list
var<private> sums: array<vec4<f32>, 2>;
var<private> best: f32;
var<private> best_id: u32;

fn exponent(key: u32) -> f32 {
  return select(max(order_value(key) - order_value(top_key), -LARGEST) * sampling.inverse, 0.0, key == top_key);
}

fn noise(id: u32) -> f32 {
  let bits = threefry(sampling.seed, vec2<u32>(position, id));
  let u = (f32(bits.x) + ((f32(bits.y) + 0.5) * 2.3283064e-10)) * 2.3283064e-10;  // fine near 0, where the noise is large
  let series = u * (1.0 + (u * (0.5 + (u * (0.33333333 + (u * (0.25 + (u * 0.2))))))));
  let rest = (f32(~bits.x) + 0.5) * 2.3283064e-10;                          // 1 - u
  return -log(select(-log(rest), series, u < 0.03125));   // of an exponential variate, -log(1 - u)
}

// One token: into the list, and to the sums or the draw.
fn consider(key: u32, id: u32, by_mass: bool, ties: bool, drawing: bool) {
  if (key < floor_key || key < limit.x || (key == limit.x && id > limit.y)) {
    return;
  }
  if (drawing) {
    let score = exponent(key) + noise(id);
    if (best_id == NONE || score > best) {
      best = score;
      best_id = id;
    }
    return;
  }
  if (passes > 0u) {
    kept[(filled * WORKGROUP) + lane] = vec2<u32>(key, id);
    filled += 1u;
  }
  var measure = 1.0;
  if (by_mass) {
    measure = exp(exponent(key));
  }
  let value = select(key, select(0u, params.vocab - id, key == floor_key), ties);
  //@ unroll h in 0..2
  sums[$h] += select(vec4<f32>(0.0), vec4<f32>(measure), vec4<u32>(value) >= vec4<u32>(cuts[4 * $h], cuts[(4 * $h) + 1], cuts[(4 * $h) + 2], cuts[(4 * $h) + 3]));
  //@ end
}

// All tokens that may still be possible.
fn visit(by_mass: bool, ties: bool, drawing: bool) {
  let listed = filled;
  filled = 0u;
  if (passes > 1u) {
    for (var j = 0u; j < listed; j++) {
      let found = kept[(j * WORKGROUP) + lane];
      consider(found.x, found.y, by_mass, ties, drawing);
    }
  } else {
    for (var i = lane; i < (params.vocab + 3u) / 4u; i += WORKGROUP) {
      let v = logits[i];
      //@ unroll c in 0..4
      if ((i * 4u) + $cu < params.vocab) {
        consider(order_key(v[$c]), (i * 4u) + $cu, by_mass, ties, drawing);
      }
      //@ end
    }
  }
  passes += 1u;
}

// Thresholds of the next round, within [low, high).
fn plan(ties: bool) {
  busy = select(0u, 1u, high > low && (first == 1u || high - low > 1u));
  let span = high - low;
  for (var j = 0u; j < 8u; j++) {
    var cut = low + (max(span / 9u, 1u) * (j + 1u));
    if (!ties) {
      if (j < 4u) {  // equal steps of the keys come to an end in any case, equal steps of the numbers do so fast where numbers are alike
        cut = low + (max(span / 5u, 1u) * (j + 1u));
      } else {
        let from_value = max(order_value(low), -LARGEST);
        let to_value = min(order_value(high), LARGEST);
        let part = f32(j - 3u) * 0.2;
        cut = order_key(bitcast<u32>((from_value * (1.0 - part)) + (to_value * part)));
      }
    }
    cuts[j] = clamp(cut, min(low + 1u, high - 1u), high - 1u);
  }
  if (first == 1u) {
    cuts[0] = low;
  }
}

// What the sums above the thresholds tell.
fn narrow(by_mass: bool, ties: bool) {
  var found = array<vec4<f32>, 2>(vec4<f32>(0.0), vec4<f32>(0.0));
  for (var i = 0u; i < LEADERS; i++) {
    found[0] += bitcast<vec4<f32>>(leading[2u * i]);
    found[1] += bitcast<vec4<f32>>(leading[(2u * i) + 1u]);
  }
  if (first == 1u) {
    first = 0u;
    from_low = found[0].x;
    if (by_mass) {
      goal = sampling.top_p * from_low;
    }
    if (from_low < goal) {  // there are no more than top-k wants
      high = low;
    }
  }
  for (var j = 0u; j < 8u; j++) {
    let measure = found[j / 4u][j % 4u];
    if (measure >= goal) {
      if (cuts[j] >= low) {
        low = cuts[j];
        from_low = measure;
      }
    } else if (cuts[j] < high) {
      high = cuts[j];
      from_high = measure;
    }
  }
  plan(ties);
  if (!by_mass && from_low == goal) {  // just so many
    busy = 0u;
  }
}

fn rounds(by_mass: bool, ties: bool) {
  loop {
    if (workgroupUniformLoad(&busy) == 0u) {
      break;
    }
    if (!ties) {
      floor_key = low;
    }
    sums = array<vec4<f32>, 2>(vec4<f32>(0.0), vec4<f32>(0.0));
    visit(by_mass, ties, false);
    shared_sums[2u * lane] = bitcast<vec4<u32>>(sums[0]);
    shared_sums[(2u * lane) + 1u] = bitcast<vec4<u32>>(sums[1]);
    workgroupBarrier();
    if (lane < LEADERS) {
      var a = vec4<f32>(0.0);
      var b = vec4<f32>(0.0);
      for (var i = lane; i < WORKGROUP; i += LEADERS) {
        a += bitcast<vec4<f32>>(shared_sums[2u * i]);
        b += bitcast<vec4<f32>>(shared_sums[(2u * i) + 1u]);
      }
      leading[2u * lane] = bitcast<vec4<u32>>(a);
      leading[(2u * lane) + 1u] = bitcast<vec4<u32>>(b);
    }
    workgroupBarrier();
    if (lane == 0u) {
      narrow(by_mass, ties);
    }
  }
}

// The border at which the measure of what is kept reaches the goal (of probability: top_p of all there is).
fn search(by_mass: bool) {
  if (lane == 0u) {
    low = floor_key;
    high = select(top_key + 1u, 0u, top_key == ORDER_NAN);
    goal = f32(sampling.top_k);
    from_low = 0.0;
    from_high = 0.0;
    first = 1u;
    plan(false);
  }
  rounds(by_mass, false);
  if (lane == 0u) {
    border = vec2<u32>(low, params.vocab);
    busy = 0u;
    var unit = 1.0;
    if (by_mass) {
      unit = exp(exponent(low));
    }
    let wanted = max(ceil((goal - from_high) / unit), 1.0);
    if (wanted < round((from_low - from_high) / unit)) {  // not all that are equal there: by their ids
      low = 1u;
      high = params.vocab + 1u;
      goal = wanted;
      first = 0u;
      plan(true);
      border.y = NONE;
    }
  }
  floor_key = workgroupUniformLoad(&border).x;
  rounds(false, true);
  if (lane == 0u && border.y == NONE) {
    border.y = params.vocab - low;
  }
  limit = workgroupUniformLoad(&border);
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) index: u32) {
  lane = index;
  position = state[0] + state[1];
  passes = 0u;
  filled = 0u;
  if (lane == 0u) {
    atomicStore(&top, 0u);
  }
  workgroupBarrier();
  var largest = 0u;
  for (var i = lane; i < (params.vocab + 3u) / 4u; i += WORKGROUP) {
    let v = logits[i];
    //@ unroll c in 0..4
    largest = max(largest, select(0u, order_key(v[$c]), (i * 4u) + $cu < params.vocab));
    //@ end
  }
  atomicMax(&top, largest);
  workgroupBarrier();
  top_key = atomicLoad(&top);
  floor_key = top_key;  // of infinity
  if (top_key < ORDER_INFINITY) {
    floor_key = max(order_key(bitcast<u32>(max(order_value(top_key) - sampling.reach, -LARGEST))), ORDER_LOWEST);
  }
  limit = vec2<u32>(floor_key, params.vocab);
  if (sampling.top_k > 0u) {
    search(false);
  }
  if (sampling.top_p < 1.0) {
    search(true);
  }
  best = -LARGEST;
  best_id = NONE;
  visit(false, false, true);
  shared_sums[lane] = vec4<u32>(bitcast<u32>(best), best_id, 0u, 0u);
  workgroupBarrier();
  if (lane < LEADERS) {
    leading[lane] = likelier(lane, LEADERS, WORKGROUP);
  }
  workgroupBarrier();
  if (lane == 0u) {
    for (var i = 0u; i < LEADERS; i++) {
      shared_sums[i] = leading[i];
    }
    let token = select(likelier(0u, 1u, LEADERS).y, NONE, top_key == ORDER_NAN);
    kept[params.slots] = limit;
    history[position % params.ring] = token;
    state[0] = position;
    state[1] = 1u;
    state[TOKENS_AT] = min(token, params.vocab - 1u);
  }
}

// Of every so many of the shared (score, id, ...), the one with the largest score, on a tie the lowest id.
fn likelier(begin: u32, step: u32, end: u32) -> vec4<u32> {
  var found = shared_sums[begin];
  for (var i = begin + step; i < end; i += step) {
    let other = shared_sums[i];
    let ahead = bitcast<f32>(other.x) - bitcast<f32>(found.x);
    if (found.y == NONE || (other.y != NONE && (ahead > 0.0 || (ahead == 0.0 && other.y < found.y)))) {
      found = other;
    }
  }
  return found;
}
