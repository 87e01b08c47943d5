// Matrices in scratch memory, one plane a head of a sequence. A round of dispatches computes `planes` planes, the first of which is `first`
// of all (counted batch by batch, head by head); z is a plane's number within the round.

struct Matrices {
  first: u32, planes: u32,
  rows: u32,             // queries, padded
  columns: u32,          // keys, padded to a multiple of 4 at least
  depth: u32,            // channels of a query or key, padded
  channels: u32,         // channels of a value, padded
  mask_planes: u32,      // masks that the round needs
  mask_share: u32,       // neighbouring planes that share a mask
}
var<uniform> matrices: Matrices;

fn batch_of(z: u32) -> u32 { return (matrices.first + z) / params.heads; }
fn head_of(z: u32) -> u32 { return (matrices.first + z) % params.heads; }
fn mask_plane(z: u32) -> u32 { return (matrices.first + z) / matrices.mask_share - matrices.first / matrices.mask_share; }
fn kv_plane(z: u32) -> u32 {
  let ratio = params.heads / params.kv_heads;
  return (matrices.first + z) / ratio - matrices.first / ratio;
}
