// rANS (rans.md), and the segments of the codecs lossless and transform.
import { badPayload } from "./errors.js";

// A table from its frequencies: the symbol of each slot, frequencies and their sums below.
export function ransTable(frequencies, name) {
  const symbols = new Uint8Array(4096);
  const bases = new Uint16Array(frequencies.length);
  let sum = 0;
  for (let s = 0; s < frequencies.length && sum <= 4096; s++) {
    bases[s] = sum;
    symbols.fill(s, sum, sum + frequencies[s]);
    sum += frequencies[s];
  }
  if (sum !== 4096) badPayload("rans-1", `${name}: frequencies do not sum to 4096`);
  return { symbols, frequencies, bases };
}
const LANES = 32;
const lanes = new Float64Array(LANES);
// The segments of a side, one for each sequence, head and token group.
export class Segments {
  // `counts`: the words of each segment; their sum has to be that of `words`, by `rule`.
  constructor(data, counts, rule) {
    const { batch, heads, groups } = data.side;
    Object.assign(this, { counts, states: data.u16("states"), words: data.u16("words") });
    // The first word of each segment. Words are in the order of groups, sequences and heads.
    this.starts = new Float64Array(counts.length);
    let sum = 0;
    for (let group = 0; group < groups; group++)
      for (let index = group; index < batch * heads * groups; index += groups) {
        this.starts[index] = sum;
        sum += counts[index];
      }
    const { length } = this.words;
    if (sum !== length) badPayload(rule, `word_counts sum to ${sum}, and there are ${length} words`);
  }
  check(index) {
    for (let i = 2 * LANES * index + 1; i < 2 * LANES * (index + 1); i += 2)
      if (this.states[i] === 0) badPayload("rans-2", `segment ${index}: a first state is below 65536`);
  }
  // Decode n symbols of a segment, symbol i by tables[i div each]. Returns the next word.
  decode(index, n, tables, each, out) {
    this.check(index);
    const { states, words } = this;
    for (let l = 0, at = 2 * LANES * index; l < LANES; l++, at += 2)
      lanes[l] = states[at] + states[at + 1] * 65536;
    let next = this.starts[index];
    const end = this.end(index);
    for (let start = 0, t = 0; start < n; start += each, t++) {
      const { symbols, frequencies, bases } = tables[t];
      const stop = Math.min(start + each, n);
      for (let i = start; i < stop; i++) {
        const state = lanes[i & 31] >>> 0;
        const slot = state & 4095;
        const symbol = symbols[slot];
        let x = frequencies[symbol] * (state >>> 12) + slot - bases[symbol];
        if (x < 65536) {
          if (next === end) badPayload("rans-3", `segment ${index} needs more words than it has`);
          x = x * 65536 + words[next++];
        }
        lanes[i & 31] = x;
        out[i] = symbol;
      }
    }
    if (lanes.some((state) => state !== 65536)) badPayload("rans-4", `segment ${index}: another last state`);
    return next;
  }
  end = (index) => this.starts[index] + this.counts[index];
}
