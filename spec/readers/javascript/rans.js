// rANS (rans.md).

import { badPayload } from "./errors.js";

// A table from its frequencies: the symbol of each slot, frequencies and their sums below.
export function ransTable(frequencies, name) {
  const symbols = new Uint8Array(4096);
  const bases = new Uint16Array(frequencies.length);
  let sum = 0;
  for (let s = 0; s < frequencies.length; s++) {
    bases[s] = sum;
    if (sum + frequencies[s] > 4096) sum = Infinity;
    if (sum === Infinity) break;
    symbols.fill(s, sum, sum + frequencies[s]);
    sum += frequencies[s];
  }
  if (sum !== 4096) badPayload("rans-1", `${name}: frequencies do not sum to 4096`);
  return { symbols, frequencies, bases };
}

// Check the first states of the chunk `index`; `states` is the whole stream.
export function checkStates(states, index) {
  for (let i = 64 * index + 1; i < 64 * index + 64; i += 2)
    if (states[i] === 0) badPayload("rans-2", `states of chunk ${index}: a first state is below 65536`);
}

const lanes = new Float64Array(32);

// Decode n symbols of the chunk `index` to `out`; symbol i has the table tables[i div each].
// Returns how many of the `count` words from `from` on they take.
export function ransDecode(states, index, words, from, count, n, tables, each, out) {
  checkStates(states, index);
  for (let l = 0; l < 32; l++) lanes[l] = states[64 * index + 2 * l] + states[64 * index + 2 * l + 1] * 65536;
  let next = from;
  const end = from + count;
  for (let start = 0, t = 0; start < n; start += each, t++) {
    const { symbols, frequencies, bases } = tables[t];
    const stop = Math.min(start + each, n);
    for (let i = start; i < stop; i++) {
      const state = lanes[i & 31] >>> 0;
      const slot = state & 4095;
      const symbol = symbols[slot];
      let x = frequencies[symbol] * (state >>> 12) + slot - bases[symbol];
      if (x < 65536) {
        if (next === end) badPayload("rans-3", `chunk ${index} needs more than its ${count} words`);
        x = x * 65536 + words[next++];
      }
      lanes[i & 31] = x;
      out[i] = symbol;
    }
  }
  for (let l = 0; l < 32; l++)
    if (lanes[l] !== 65536) badPayload("rans-4", `chunk ${index}: the last state of lane ${l} is not 65536`);
  return next - from;
}
