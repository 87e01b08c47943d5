// Attention of many queries on matrix units as attention/flash_matrix.wgsl computes it, with two barriers for a tile of keys instead of four: while the
// lanes take the softmax of a tile's scores, its values and the next keys are stored; then matrix units make the next scores and these outputs.
//                                                                                                            reference.attention
// A workgroup computes 16 rows a subgroup, as flash_rows numbers them, and walks over the keys that any of them sees, KEYS at a time.
// Outputs are rescaled only where the maximum of a row grew by more than 8 (scores are in log2 units).
// Workgroup memory: MEMORY: a tile of keys, one of values, scores and probabilities of each subgroup; at first the queries; outputs where scores were.
// Options: HEAD_DIM, VALUE_DIM, KEYS, KEY_MATRICES = KEYS / 16, K_MATRICES, V_MATRICES = dims / 16 (rounded up), K_LOADS, V_LOADS = KEYS * matrices * 2 /
// WORKGROUP (rounded up), QUADS = KEYS / 4 / LANES_ROW, LANES_ROW = SUBGROUP / 16, PLAIN, WORKGROUP, SUBGROUP, MEMORY;
// parts: problem, lengths_*, rows_* as query, keys and values, row_halves_* and row_eights_* as keys and values, adjust_*, flash_rows, flash_units, store_* as out, finish, sink_*, lse_*.

const V_AT = 16u * KEYS * K_STRIDE;              // bytes
const S_AT = V_AT + 16u * KEYS * V_STRIDE;
const P_STRIDE = KEYS / 8u + 1u;                 // in vectors of eight halves
const P_AT = S_AT + 16u * TILE_ROWS * S_STRIDE;
const FACTORS_AT = P_AT + 16u * TILE_ROWS * P_STRIDE;
const FLAG_AT = FACTORS_AT + 4u * TILE_ROWS;
const O_STRIDE = 16u * S_STRIDE;                 // vectors of four floats a subgroup: a matrix of outputs where its scores are at other times

var<workgroup> memory: buffer<MEMORY>;           // the only variable: others would share its bytes

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>, @builtin(local_invocation_index) index: u32) {
  let team = index / SUBGROUP;
  let lane = index % SUBGROUP;
  let b = group.z;
  let first_row = (params.first_group + groups.x - 1u - group.x) * TILE_ROWS;   // late rows see the most keys where the rule is causal: they begin
  if (first_row >= flash_count()) { return; }
  let k_at = b * params.k_batch + group.y * params.k_head;
  let v_at = b * params.v_batch + group.y * params.v_head;
  let k_vectors = bufferView<array<vec4<u32>, KEYS * K_STRIDE>>(&memory, 0);
  let k_halves = bufferView<array<f16, KEYS * K_STRIDE * 8u>>(&memory, 0);
  let v_vectors = bufferView<array<vec4<u32>, KEYS * V_STRIDE>>(&memory, V_AT);
  let v_halves = bufferView<array<f16, KEYS * V_STRIDE * 8u>>(&memory, V_AT);
  let s_floats = bufferView<array<f32, TILE_ROWS * S_STRIDE * 4u>>(&memory, S_AT);
  let s_vectors = bufferView<array<vec4<f32>, TILE_ROWS * S_STRIDE>>(&memory, S_AT);
  let p_pairs = bufferView<array<vec2<u32>, TILE_ROWS * P_STRIDE * 2u>>(&memory, P_AT);
  let p_halves = bufferView<array<f16, TILE_ROWS * P_STRIDE * 8u>>(&memory, P_AT);
  let factors = bufferView<array<f32, TILE_ROWS>>(&memory, FACTORS_AT);
  let flags = bufferView<array<u32, 2>>(&memory, FLAG_AT);     // whether outputs are rescaled, by turns
  let q_pairs = bufferView<array<vec2<u32>, TILE_ROWS * K_STRIDE * 2u>>(&memory, 0);
  let q_halves = bufferView<array<f16, TILE_ROWS * K_STRIDE * 8u>>(&memory, 0);

  // Queries: through memory into matrices.
  for (var n = index; n < TILE_ROWS * K_PIECES * 2u; n += WORKGROUP) {
    let r = n / (K_PIECES * 2u);
    let c = n % (K_PIECES * 2u);
    q_pairs[r * K_STRIDE * 2u + c] = query_halves(flash_query(b, flash_row(b, group.y, first_row + r)), c);
  }
  workgroupBarrier();
  //@ unroll d in 0..K_MATRICES
  let query$d = subgroupMatrixLoad<Left, row_major>(q_halves, team * 16u * K_STRIDE * 8u + $du * 16u, K_STRIDE * 8u);
  //@ end
  workgroupBarrier();
  if (index < 2u) { flags[index] = 0u; }

  //@ unroll d in 0..V_MATRICES
  var o$d: Sums;
  //@ end
  let own = team * 16u + lane / LANES_ROW;       // the row whose scores this lane takes, and which part of them
  let part = lane % LANES_ROW;
  let row = flash_row(b, group.y, first_row + own);
  var reference = LOWEST;                        // what the row's probabilities are relative to
  var sum = 0.0;
  let seen = flash_keys(b, first_row, TILE_ROWS);
  let all_from = first_key(b, (min(first_row + TILE_ROWS, flash_count()) - 1u) / flash_ratio());     // every row sees the keys from here
  let all_to = end_key(b, first_row / flash_ratio());                                                // to here
  let last = max(seen.y, 1u) - 1u;
  //@ unroll n in 0..K_LOADS
  let k_key$n = min((index + $nu * WORKGROUP) / K_PIECES, KEYS - 1u);
  let k_piece$n = (index + $nu * WORKGROUP) % K_PIECES;
  var k$n = keys_eight(k_at + min(seen.x + k_key$n, last) * params.k_row, k_piece$n);
  //@ end
  //@ unroll n in 0..V_LOADS
  let v_key$n = min((index + $nu * WORKGROUP) / V_PIECES, KEYS - 1u);
  let v_piece$n = (index + $nu * WORKGROUP) % V_PIECES;
  var v$n = v_vector(v_at + min(seen.x + v_key$n, last) * params.v_row, v_piece$n, seen.x + v_key$n < seen.y);
  //@ end
  //@ unroll n in 0..K_LOADS
  k_vectors[k_key$n * K_STRIDE + k_piece$n] = k$n;
  k$n = keys_eight(k_at + min(seen.x + KEYS + k_key$n, last) * params.k_row, k_piece$n);
  //@ end
  workgroupBarrier();
  var turn = 0u;
  for (var base = seen.x; ; base += KEYS) {      // scores of these keys, outputs of those before
    let some = base < seen.y;
    if (flags[turn] != 0u) {                     // the same for all: outputs go through memory
      //@ unroll d in 0..V_MATRICES
      subgroupMatrixStore<row_major>(s_floats, team * O_STRIDE * 4u, o$d, 16);
      workgroupBarrier();
      for (var n = lane; n < 64u; n += SUBGROUP) { s_vectors[team * O_STRIDE + n] *= factors[team * 16u + n / 4u]; }
      workgroupBarrier();
      o$d = subgroupMatrixLoad<Sums, row_major>(s_floats, team * O_STRIDE * 4u, 16);
      workgroupBarrier();
      //@ end
    }
    turn = 1u - turn;
    if (index == 0u) { flags[turn] = 0u; }       // nobody looks at it before the next tile
    if (some) {
      //@ unroll k in 0..KEY_MATRICES
      {
        var scores = Sums();
        //@ unroll d in 0..K_MATRICES
        scores = subgroupMatrixMultiplyAccumulate(query$d, subgroupMatrixLoad<Right, col_major>(k_halves, $ku * 16u * K_STRIDE * 8u + $du * 16u, K_STRIDE * 8u), scores);
        //@ end
        subgroupMatrixStore<row_major>(s_floats, team * 16u * S_STRIDE * 4u + $ku * 16u, scores, S_STRIDE * 4u);
      }
      //@ end
    }
    if (base > seen.x) {
      //@ unroll k in 0..KEY_MATRICES
      {
        let p = subgroupMatrixLoad<Left, row_major>(p_halves, team * 16u * P_STRIDE * 8u + $ku * 16u, P_STRIDE * 8u);
        //@ unroll d in 0..V_MATRICES
        o$d = subgroupMatrixMultiplyAccumulate(p, subgroupMatrixLoad<Right, row_major>(v_halves, $ku * 16u * V_STRIDE * 8u + $du * 16u, V_STRIDE * 8u), o$d);
        //@ end
      }
      //@ end
    }
    workgroupBarrier();
    if (!some) { break; }
    let next = base + KEYS;
    //@ unroll n in 0..V_LOADS
    v_vectors[v_key$n * V_STRIDE + v_piece$n] = v$n;
    //@ end
    //@ unroll n in 0..K_LOADS
    k_vectors[k_key$n * K_STRIDE + k_piece$n] = k$n;
    //@ end
    if (next < seen.y) {                         // what comes next is loaded into registers
      //@ unroll n in 0..V_LOADS
      v$n = v_vector(v_at + min(next + v_key$n, last) * params.v_row, v_piece$n, next + v_key$n < seen.y);
      //@ end
    }
    if (next + KEYS < seen.y) {
      //@ unroll n in 0..K_LOADS
      k$n = keys_eight(k_at + min(next + KEYS + k_key$n, last) * params.k_row, k_piece$n);
      //@ end
    }
    let inner = PLAIN && base >= all_from && next <= all_to;
    var high = LOWEST;
    //@ unroll v in 0..QUADS
    var x$v = s_vectors[own * S_STRIDE + part * QUADS + $vu];
    if (!inner) {
      let j = base + (part * QUADS + $vu) * 4u;
      x$v = vec4<f32>(flash_score(x$v.x, b, row, j), flash_score(x$v.y, b, row, j + 1u), flash_score(x$v.z, b, row, j + 2u), flash_score(x$v.w, b, row, j + 3u));
    }
    high = max(high, max(max(x$v.x, x$v.y), max(x$v.z, x$v.w)));
    //@ end
    for (var distance = 1u; distance < LANES_ROW; distance <<= 1u) { high = max(high, subgroupShuffleXor(high, distance)); }
    if (high > reference + 8.0) {
      let keep = exp2(max(reference - high, -126.0));
      if (reference > LOWEST) { flags[turn] = 1u; }
      if (part == 0u) { factors[own] = keep; }
      sum *= keep;
      reference = high;
    } else if (part == 0u) {
      factors[own] = 1.0;
    }
    //@ unroll v in 0..QUADS
    {
      let p = select(exp2(x$v - reference), vec4<f32>(), x$v <= vec4<f32>(LOWEST));
      sum += dot(p, vec4<f32>(1.0));
      p_pairs[own * P_STRIDE * 2u + part * QUADS + $vu] = vec2<u32>(pack2x16float(p.xy), pack2x16float(p.zw));
    }
    //@ end
    workgroupBarrier();
  }
  for (var distance = 1u; distance < LANES_ROW; distance <<= 1u) { sum += subgroupShuffleXor(sum, distance); }
  let real = first_row + own < flash_count();
  if (part == 0u) { factors[own] = finish(b, row.h, row.i, reference, sum, real); }
  //@ unroll d in 0..V_MATRICES
  subgroupMatrixStore<row_major>(s_floats, team * O_STRIDE * 4u, o$d, 16);
  workgroupBarrier();
  for (var n = lane; n < 64u; n += SUBGROUP) {
    let r = team * 16u + n / 4u;
    let c = $du * 4u + n % 4u;
    if (first_row + r < flash_count() && c < VALUE_WIDTH) {
      let factor = factors[r];
      let at = flash_output(b, flash_row(b, group.y, first_row + r));
      out_store(at, c, select(s_vectors[team * O_STRIDE + n] * factor, vec4<f32>(), factor <= 0.0));
    }
  }
  workgroupBarrier();
  //@ end
}
