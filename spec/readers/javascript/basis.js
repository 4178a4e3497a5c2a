// A basis in memory (basis.md).

import { badHeader, badPayload } from "./errors.js";
import { finite, floats } from "./numbers.js";
import { ransTable } from "./rans.js";

export class Basis {
  // `sides`: Map from "layer.side" to binary32 rows; `states`: Map from a name to bytes.
  constructor(header, digest, sides, states) {
    this.header = header;
    this.digest = digest;
    this.sides = sides;
    this.states = new Map();
    for (const state of header.states) this.states.set(state.name, { ...state, ...readState(state, states) });
    this.#readTables();
  }

  state(layer, key) {
    return this.states.get(`${layer}.state.${key}`) ?? null;
  }

  #readTables() {
    const frequencies = this.state(0, "table.frequencies");
    if (!frequencies || !this.state(0, "table.values")) return;
    const [, count, symbols] = frequencies.shape;
    const { values } = this.state(0, "table.values");
    this.tables = Array.from({ length: count }, (_, i) => ({
      ...ransTable(frequencies.values.subarray(i * symbols, (i + 1) * symbols), "table.frequencies"),
      values: values.subarray(i * (symbols - 1), (i + 1) * (symbols - 1)),
    }));
  }

  side(layer, which) {
    return this.header.layers[layer]?.[which] ?? null;
  }

  // The rows of a side for the codec klt.
  rowsFor(layer, which, dim, heads) {
    const side = this.side(layer, which);
    if (!side) badHeader("klt-6", `the basis has no side ${which} of layer ${layer}`);
    if (side.dim !== dim || side.heads !== heads)
      badHeader(
        "klt-7",
        `the basis is for ${side.heads} heads of ${side.dim} channels, not ${heads} of ${dim}`,
      );
    return this.sides.get(`${layer}.${which}`);
  }

  // The frames of a side for the codec transform.
  framesFor({ layer, side: which, dim, scope }, heads) {
    const side = this.side(layer, which);
    const frames = this.state(layer, `${which}.frames`);
    if (!side || !frames) badHeader("transform-6", `the basis has no frames for ${which} of layer ${layer}`);
    const [count, size] = scope === "head" ? [heads, dim] : [1, heads * dim];
    if (side.dim !== dim || side.heads !== heads || frames.shape[1] !== count || frames.shape[3] !== size)
      badHeader("transform-7", `the frames of ${which} of layer ${layer} are of another scope or shape`);
    const scales = this.state(layer, `${which}.scales`).values;
    const { tables } = this;
    const table = (column, step) =>
      tables[Math.min(Math.floor(Math.max(step - scales[column], 0) / 4), tables.length - 1)];
    return { rows: frames.values, table };
  }

  rope(layer) {
    const halves = this.state(layer, "rope.halves");
    const state = halves ?? this.state(layer, "rope.neighbours");
    return state && { frequencies: state.values, halves: state === halves };
  }
}

const RULES = [
  [/^(k|v)\.frames$/, "basis-14"],
  [/^rope\.(halves|neighbours)$/, "basis-15"],
  [/^k\.(balanced|centered|queries|mean)$/, "basis-23"],
];

function readState(state, states) {
  const bytes = states.get(state.name);
  const table = state.layer === 0 && state.key === "table.values";
  const rule = table ? "basis-14" : RULES.find(([pattern]) => pattern.test(state.key))?.[1];
  if (!rule) return { values: floats(bytes, state.dtype) };
  const values = finite(bytes, state.dtype, state.name, rule);
  if (rule === "basis-15" && values.some((frequency) => !(frequency >= 0 && frequency <= 2)))
    badPayload("basis-15", `${state.name} has a frequency outside 0 to 2`);
  return { values };
}
