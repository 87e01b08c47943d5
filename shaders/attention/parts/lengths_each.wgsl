// Each sequence has its own number of keys.
var<storage, read> key_lengths: array<u32>;      // (batch), each at most keys
fn query_count() -> u32 { return params.queries; }
fn key_count(b: u32) -> u32 { return min(key_lengths[b], params.keys); }
