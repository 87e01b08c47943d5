// A random function of a key and a counter: Threefry-2x32 of 13 rounds (Salmon, Moraes, Dror and Shaw 2011), additions and rotations only.
// Workgroup memory: none.

fn threefry(key: vec2<u32>, counter: vec2<u32>) -> vec2<u32> {
  let keys = array<u32, 3>(key.x, key.y, (key.x ^ key.y) ^ 0x1bd11bdau);
  let turns = array<u32, 8>(13u, 15u, 26u, 6u, 17u, 29u, 16u, 24u);
  var x = counter + key;
  for (var i = 0u; i < 13u; i++) {
    let turn = turns[i % 8u];
    x.x += x.y;
    x.y = ((x.y << turn) | (x.y >> (32u - turn))) ^ x.x;
    if (i % 4u == 3u) {
      let group = (i / 4u) + 1u;
      x += vec2<u32>(keys[group % 3u], keys[(group + 1u) % 3u] + group);
    }
  }
  return x;
}
