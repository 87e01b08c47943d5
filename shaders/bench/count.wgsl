// counter += 1, by one invocation: what a dispatch costs that does next to nothing and has to wait for the one before it.
// Workgroup memory: none.
// Options: none.

var<storage, read_write> counter: array<u32>;          // (1) u32

@compute @workgroup_size(1)
fn main() {
  counter[0] += 1u;
}
