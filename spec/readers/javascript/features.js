// Required and ignorable features with data (container.md, Token ids to Metadata).
import { badPayload, limit, need } from "./errors.js";
import { compareText, decodeUtf8, MAX_NAMES, MAX_STRING_BYTES } from "./msgpack.js";
import { Cursor, concat, isZero, view } from "./numbers.js";
import { MAX_TOKENS } from "./schema.js";

// Those of codecs: the rule about them, and whether a codec uses one.
const OF_CODECS = [
  ["raw-positions", "container-55", (p) => p.raw_positions],
  ["token-scale-per-head", "container-61", (p) => p.token_scale?.endsWith("-per-head")],
  ["key-mean", "container-62", (p) => p.key_mean],
  ["balanced", "container-63", (p) => p.balanced],
  ["log-norms", "container-64", (p) => p.norm === "log8"],
];
const OTHERS = ["basis", "hidden-tokens", "layer-positions", "layer-state", "position-offsets"];
export const FEATURES = [...OF_CODECS.map(([name]) => name), ...OTHERS];
// Read the features of a header whose layers are read: states, starts, end, hidden, offsets and metadata.
export function readFeatures(header) {
  for (const [name, rule, uses] of OF_CODECS) {
    const required = header.required.includes(name);
    need(header.codecs.some(uses) === required, rule, `required and the codecs differ in ${name}`);
  }
  header.states = readStates(header);
  header.starts = readStarts(header);
  const sides = header.layers.flatMap(({ k, v }) => k ?? v ?? []);
  const ends = sides.map(({ layer, length }) => header.starts[layer] + length);
  header.end = ends.reduce((end, one) => Math.max(end, one), header.start);
  header.batches = [...sides.map(({ batch }) => batch), ...header.states.map(({ shape }) => shape[0])];
  header.hidden = readHidden(header);
  header.offsets = readOffsets(header);
  header.metadata = header.ignorable.has("metadata") ? readMetadata(header.ignorable.get("metadata")) : null;
}
// Cursors at the records of a feature that has a name and data, null without it. `pairing` is the rule that a
// name without data breaks, and data without it; `form` that of data of another size.
function records(header, name, width, pairing, form, count = null) {
  const bytes = header.ignorable.get(name);
  need(header.required.includes(name) === (bytes !== undefined), pairing, `${name} lacks its name or data`);
  if (!bytes) return null;
  const { length } = bytes;
  const whole = count === null ? length > 0 && length % width === 0 : length === count * width;
  need(whole, form, `${name} has ${length} bytes, not records of ${width}`);
  return Array.from({ length: length / width }, (_, i) => new Cursor(bytes, null, i * width));
}

function readStarts(header) {
  const { layers, start } = header;
  const found = records(header, "layer-positions", 8, "container-35", "container-36", layers.length);
  if (!found) return layers.map(() => start);
  const starts = layers.map(({ k, v }, i) => {
    const value = found[i].big(8);
    limit(value, MAX_TOKENS, `start of layer ${i}`);
    need(value >= start, "container-37", `the start of layer ${i} is ${value}, before ${start}`);
    need(k || v || Number(value) === start, "container-38", `layer ${i} without sides starts at ${value}`);
    return Number(value);
  });
  need(!starts.every((value) => value === start), "container-39", "layer-positions has one start only");
  return starts;
}
const STATE_DTYPES = ["U8", "U16", "F16", "BF16", "F32"];

function readStates(header) {
  const { layers } = header;
  const found = records(header, "layer-state", 96, "container-41", "container-42") ?? [];
  const states = found.map((record) => readState(record, layers.length));
  states.forEach(({ layer, key, name, shape }, i) => {
    const before = states[i - 1] ?? { layer: -1 };
    const ascends = before.layer < layer || (before.layer === layer && before.key < key);
    need(ascends, "container-45", `the records of states are not in order at ${name}`);
    const others = [layers[layer].k?.batch, layers[layer].v?.batch].filter(Boolean);
    if (before.layer === layer) others.push(before.shape[0]);
    need(!others.some((other) => other !== shape[0]), "container-46", `${name} has ${shape[0]} sequences`);
  });
  return states;
}

function readState(record, layers) {
  const layer = record.number(2);
  const [dtype, rank] = record.take(2);
  const sizes = Array.from({ length: 8 }, () => record.big(8));
  const text = record.take(28);
  const [key] = String.fromCharCode(...text).split("\0");
  const named = /^[a-z][a-z0-9_.]*$/.test(key) && isZero(text.subarray(key.length));
  const sized = rank >= 1 && rank <= 8 && sizes.every((size, i) => size > 0n === i < rank);
  const formed = dtype < STATE_DTYPES.length && named && sized;
  need(formed, "container-43", `a record of a state of layer ${layer} is not of its form`);
  const shape = sizes.slice(0, rank).map(Number);
  shape.forEach((size, i) => limit(size, i ? MAX_TOKENS : 65536, `a size of the state ${layer}.${key}`));
  need(layer < layers, "container-44", `a state of layer ${layer}, of ${layers} layers`);
  return { layer, key, name: `${layer}.state.${key}`, dtype: STATE_DTYPES[dtype], shape };
}

function readHidden(header) {
  const { start, end, batches } = header;
  let last = [-1, 0, 0];
  return (records(header, "hidden-tokens", 20, "container-49", "container-50") ?? []).map((record) => {
    const [sequence, from, to] = [record.number(4), record.big(8), record.big(8)];
    need(sequence < Math.min(...batches), "container-51", `hidden-tokens has the sequence ${sequence}`);
    need(start <= from && from < to && to <= end, "container-52", `hidden-tokens has ${from} to ${to}`);
    const ascends = last[0] < sequence || (last[0] === sequence && last[2] < from);
    need(ascends, "container-53", `hidden-tokens is not in order at ${from}`);
    return (last = [sequence, Number(from), Number(to)]);
  });
}

function readOffsets(header) {
  const found = records(header, "position-offsets", 8, "container-56", "container-57");
  if (!found) return null;
  const same = header.batches.every((batch) => batch === found.length);
  need(same, "container-58", `position-offsets is for ${found.length} sequences`);
  return found.map((record) => {
    const offset = BigInt.asIntN(64, record.big(8));
    const position = BigInt(header.end) + offset;
    need(position >= 0n, "container-59", `the offset ${offset} leads to the position ${position}`);
    limit(position, MAX_TOKENS, `position by the offset ${offset}`);
    return Number(offset);
  });
}
// Returns the result of `read`, or null if the data have another form.
function readLoosely(bytes, read) {
  const other = (message) => badPayload("other-form", message);
  const cursor = new Cursor(bytes, other);
  const text = (size) => decodeUtf8(cursor.take(size)) ?? other();
  try {
    return read(cursor, text, (kept) => kept || other());
  } catch (error) {
    if (error.rule === "other-form") return null;
    throw error;
  }
}

function readMetadata(bytes) {
  return readLoosely(bytes, (cursor, text, expect) => {
    const result = new Map();
    for (let before = ""; cursor.left;) {
      expect(result.size < MAX_NAMES);
      const name = text(cursor.number(1));
      expect(compareText(before, name) < 0);
      before = name;
      const type = cursor.number(1);
      expect(type <= 2);
      if (type === 0) {
        const size = cursor.number(4);
        expect(size <= MAX_STRING_BYTES);
        result.set(name, text(size));
        continue;
      }
      const bits = cursor.big(8);
      const number = new Float64Array(BigUint64Array.of(bits).buffer)[0];
      expect(type === 1 || Number.isFinite(number));
      result.set(name, type === 1 ? BigInt.asIntN(64, bits) : number);
    }
    return result;
  });
}
// The ids of `inputs`, and what ids do not determine: [position, text] each.
function readInputs(bytes) {
  return readLoosely(bytes, (cursor, text, expect) => {
    const ids = view(cursor.take(4 * cursor.number(8)), Uint32Array);
    const undetermined = [];
    while (cursor.left) {
      const [position, size] = [cursor.big(8), cursor.number(4)];
      expect(size > 0);
      undetermined.push([position, text(size)]);
    }
    return { ids, undetermined };
  });
}
// What a header says of token ids, or null: `length` ids of each sequence are known, row(i) are those of one,
// and `undetermined` is what ids do not determine, or null.
export function tokenIds({ ignorable, batches, start, end }) {
  const joined = (name) => {
    const parts = [];
    for (let part; (part = ignorable.get(`${name}.${parts.length}`));) parts.push(part);
    return parts.length ? concat(...parts) : null;
  };
  const [more, rows] = [joined("token-ids"), joined("row-ids")];
  if (!ignorable.has("inputs") && !more && !rows) return null;
  const inputs = ignorable.has("inputs") ? readInputs(ignorable.get("inputs")) : null;
  const sequences = batches.length ? Math.min(...batches) : 0;
  let shared = inputs?.ids ?? new Uint32Array(0);
  const all = more && more.length % 4 === 0 ? view(more, Uint32Array) : shared;
  if (shared.every((id, i) => id === all[i])) shared = all;
  const cursor = new Cursor(rows ?? new Uint8Array(0), null);
  const [batch, count] = cursor.left < 12 ? [0, 0] : [cursor.number(4), cursor.number(8)];
  const fits = batch > 0 && batch === sequences && batch * count * 4 === cursor.left;
  const own = view(cursor.take(fits ? cursor.left : 0), Uint32Array);
  const each = fits ? count : 0;
  const length = Math.min(shared.length + each, end - start);
  const row = (i) => {
    const result = new Uint32Array(shared.length + each);
    result.set(shared);
    result.set(own.subarray(i * each, (i + 1) * each), shared.length);
    return result.subarray(0, length);
  };
  return { sequences, length, row, undetermined: inputs?.undetermined ?? null };
}
