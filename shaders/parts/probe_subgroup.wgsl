// For each invocation of one workgroup, its subgroup's size and its place in it.        gpu/profile.py
// Workgroup memory: none.   Options: WORKGROUP.

var<storage, read_write> seen: array<vec2<u32>>;   // (WORKGROUP) of (size, place) u32

override WORKGROUP: u32 = 64;

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(local_invocation_index) index: u32, @builtin(subgroup_size) size: u32, @builtin(subgroup_invocation_id) place: u32) {
  seen[index] = vec2<u32>(size, place);
}
