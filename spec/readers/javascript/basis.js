// Bases (basis.md): the rules for their headers, and a basis in memory.
import { badPayload, need } from "./errors.js";
import { finite, floats } from "./numbers.js";
import { vectorCount } from "./parameters.js";
import { ransTable } from "./rans.js";

const shaped = ({ dtype, shape }, dtypes, ...sizes) => dtypes.includes(dtype) && `${shape}` === `${sizes}`;
const statesOf = (states, layer) =>
  new Map(states.filter((state) => state.layer === layer).map((state) => [state.key, state]));
export function checkBasisHeader({ layers, states }) {
  layers.forEach(({ k, v }, i) => {
    const what = `layer ${i} of the basis`;
    const own = statesOf(states, i);
    for (const side of [k, v].filter(Boolean)) {
      const { codec, batch, tail, length, dim } = side;
      need(codec.id === "raw" && codec.dtype !== "bf16", "basis-1", `${what} has the codec ${codec.id}`);
      need(batch === 1 && !tail, "basis-2", `${what} has a batch of ${batch}, and a tail of ${tail}`);
      need(length >= vectorCount(dim), "basis-3", `${what} has ${length} vectors of ${vectorCount(dim)}`);
    }
    for (const [which, side] of Object.entries({ k, v })) checkFrames(own, which, side, what);
    checkBalanced(own, k, what);
    checkRope(own, k, what);
  });
  if (layers.length) checkTables(statesOf(states, 0), states);
}

function checkFrames(states, which, side, what) {
  const [frames, scales] = [states.get(`${which}.frames`), states.get(`${which}.scales`)];
  if (!frames && !scales) return;
  need(frames && scales && side, "basis-8", `${what} lacks frames, scales or vectors of ${which}`);
  const { heads, dim } = side;
  const fits = (q, n) => shaped(frames, ["F16", "F32"], 1, q, 1 + n, n) && shaped(scales, ["U8"], 1, q, n);
  const right = fits(heads, dim) || fits(1, heads * dim);
  need(right, "basis-9", `frames or scales of ${which} of ${what} have another dtype or shape`);
}

function checkBalanced(states, side, what) {
  const found = ["k.balanced", "k.centered", "k.queries", "k.mean"].filter((key) => states.has(key));
  if (!found.length) return;
  need(states.has("k.balanced") || states.has("k.centered"), "basis-21", `${what} has only ${found[0]}`);
  const [, h, n] = states.get(found[0]).shape;
  const { heads, dim } = side ?? { heads: h, dim: n };
  for (const key of found) {
    const dtypes = /balanced|centered/.test(key) ? ["F16", "F32"] : ["F32"];
    const sizes = key === "k.mean" ? [1, heads, dim] : [1, heads, dim, dim];
    const right = dim <= 1024 && shaped(states.get(key), dtypes, ...sizes);
    need(right, "basis-22", `${key} of ${what} has another dtype or shape`);
  }
}

function checkRope(states, side, what) {
  const [halves, neighbours] = [states.get("rope.halves"), states.get("rope.neighbours")];
  need(!halves || !neighbours, "basis-12", `${what} has both pairings of RoPE`);
  const state = halves ?? neighbours;
  if (!state) return;
  const dim = side?.dim ?? (states.get("k.balanced") ?? states.get("k.centered"))?.shape[2] ?? 0;
  const right = shaped(state, ["F32"], 1, state.shape[1]) && 2 * state.shape[1] <= dim;
  need(right, "basis-13", `${state.key} of ${what} has another dtype or shape`);
}

function checkTables(states, all) {
  const [frequencies, values] = [states.get("table.frequencies"), states.get("table.values")];
  if (!frequencies && !values && !all.some(({ key }) => /^[kv]\.frames$/.test(key))) return;
  need(frequencies && values, "basis-10", "a basis with frames or tables lacks one of the tables in layer 0");
  const [, count, symbols] = frequencies.shape;
  const sized = count >= 1 && count <= 64 && symbols >= 4 && symbols <= 256 && symbols % 2 === 0;
  const right = shaped(frequencies, ["U16"], 1, count, symbols);
  const fits = right && shaped(values, ["F16"], 1, count, symbols - 1);
  need(sized && fits, "basis-11", "the tables of the basis have another dtype or shape");
}
// States whose values must be finite, and the rule that other values violate.
const FINITE = [
  [/^[0-9]+\.state\.[kv]\.frames$|^0\.state\.table\.values$/, "basis-14"],
  [/^[0-9]+\.state\.rope\.(halves|neighbours)$/, "basis-15"],
  [/^[0-9]+\.state\.k\.(balanced|centered|queries|mean)$/, "basis-23"],
];

function stateValues({ name, dtype }, bytes) {
  const rule = FINITE.find(([pattern]) => pattern.test(name))?.[1];
  const values = rule ? finite(bytes, dtype, name, rule) : floats(bytes, dtype);
  if (rule === "basis-15" && !values.every((frequency) => frequency >= 0 && frequency <= 2))
    badPayload("basis-15", `${name} has a frequency outside 0 to 2`);
  return values;
}

export class Basis {
  // `sides`: Map from "layer.side" to binary32 vectors; `states`: Map from a name to bytes.
  constructor(header, digest, sides, states) {
    Object.assign(this, { header, digest, sides, states: new Map(), tables: [] });
    for (const state of header.states)
      this.states.set(state.name, { ...state, values: stateValues(state, states.get(state.name)) });
    const frequencies = this.state(0, "table.frequencies");
    const values = this.state(0, "table.values")?.values;
    if (!frequencies || !values) return;
    const [, count, symbols] = frequencies.shape;
    const row = (all, size, i) => all.subarray(i * size, (i + 1) * size);
    for (let i = 0; i < count; i++) {
      const table = ransTable(row(frequencies.values, symbols, i), "table.frequencies");
      this.tables.push({ ...table, values: row(values, symbols - 1, i) });
    }
  }
  state = (layer, key) => this.states.get(`${layer}.state.${key}`);
  // The vectors of a side for the codec klt.
  vectors(layer, which, dim, heads) {
    const side = this.header.layers[layer]?.[which];
    need(side, "klt-6", `the basis has no side ${which} of layer ${layer}`);
    need(side.dim === dim && side.heads === heads, "klt-7", `the basis has other heads of ${which}`);
    return this.sides.get(`${layer}.${which}`);
  }
  // The matrices of a side for the codec transform: their values, and table(column, step).
  frames({ layer, side: which, dim, scope }, heads) {
    const side = this.header.layers[layer]?.[which];
    const frames = this.state(layer, `${which}.frames`);
    need(side && frames, "transform-6", `the basis has no frames for ${which} of layer ${layer}`);
    const [count, size] = scope === "head" ? [heads, dim] : [1, heads * dim];
    const fits = shaped(frames, [frames.dtype], 1, count, 1 + size, size);
    const same = fits && side.dim === dim && side.heads === heads;
    need(same, "transform-7", `the frames of ${which} of layer ${layer} are of another scope or shape`);
    const scales = this.state(layer, `${which}.scales`).values;
    const last = this.tables.length - 1;
    const table = (column, step) => this.tables[Math.min(Math.max(step - scales[column], 0) >> 2, last)];
    return { values: frames.values, table };
  }
  rope(layer) {
    const halves = this.state(layer, "rope.halves");
    const state = halves ?? this.state(layer, "rope.neighbours");
    return state && { frequencies: state.values, halves: state === halves };
  }
}
