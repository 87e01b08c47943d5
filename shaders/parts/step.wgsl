// What changes from one replay to the next.
struct Step {
  position: u32,   // of the first token of this replay, counted from the start of the sequence
  count: u32,      // tokens in this replay; the rest of the chunk is not computed
  _a: u32,
  _b: u32,
}
var<uniform> step: Step;
