// The header map: fields, sides, tensors and features (container.md, Fields to Tensors and alignment).

import { aboveLimit, badHeader, unknownCodec, unsupported } from "./errors.js";
import { compareText, decodeUtf8, MAX_ENTRIES, MAX_STRING_BYTES, MAX_NAMES, parse, scan } from "./msgpack.js";
import { DTYPES, readCodec } from "./parameters.js";
import { WIDTHS, concat, isInteger, isZero, littleEndian, viewOf } from "./numbers.js";

const MAX_CODECS = 4096;
const MAX_LAYERS = 4096;
const MAX_BATCH = 65536;
const MAX_HEADS = 65536;
export const MAX_TOKENS = 2 ** 40 - 1;

const FEATURES =
  "balanced basis hidden-tokens key-mean layer-positions layer-state log-norms position-offsets " +
  "raw-positions token-scale-per-head";
const quoted = (text) => JSON.stringify(text.length > 80 ? `${text.slice(0, 80)}…` : text);

// Refuse what is newer than this reader, before all else.
export function refuseNew(bytes, codecs) {
  const { format, required, codecs: ids } = scan(bytes);
  if (format !== null && format > 1)
    unsupported("container-32", `the file has format ${format}; this reader knows format 1`);
  for (const name of required)
    if (!FEATURES.split(" ").includes(name))
      unsupported("container-7", `the file needs the feature ${quoted(name)}, unknown to this reader`);
  for (const id of ids)
    if (!codecs(id))
      unknownCodec("container-12", `the file needs the codec ${quoted(id)}, unknown to this reader`);
}

const isText = (value) => typeof value === "string";
const isBytes = (value) => value instanceof Uint8Array;
const HEADER_KEYS = "format required ignorable model recipe start codecs layers tensors".split(" ");
const SIDE_KEYS = "codec batch heads runs tail tail_dtype window".split(" ");

function typed(condition, what) {
  if (!condition) badHeader("container-11", what);
}

function checkKeys(map, keys, what) {
  typed(map instanceof Map, `${what} is not a map`);
  const found = [...map.keys()].join();
  typed(found === keys.join() && map.size === keys.length, `${what} has the keys ${quoted(found)}`);
}

function integer(value, least, most, what) {
  typed(isInteger(value), `${what} is not an integer`);
  typed(value >= least, `${what} is ${value}, below ${least}`);
  if (value > most) aboveLimit(`${what} is ${value}, above ${most}`);
  return value;
}

function ascending(names, rule, what) {
  names.forEach((name, i) => {
    if (i && compareText(names[i - 1], name) >= 0)
      badHeader(rule, `${what} is not in ascending order at ${quoted(name)}`);
  });
}

// Parse and check the bytes of a header. `codecs(id)`: whether the reader knows a codec; `ofRow`: a row's
// description.
export function readHeader(bytes, codecs, ofRow = false) {
  const map = parse(bytes);
  checkKeys(map, HEADER_KEYS, "the header");
  const header = Object.fromEntries(map);
  const { required } = header;
  typed(header.format === 1, `format is ${String(header.format)}, not 1`);
  typed(Array.isArray(required) && required.every(isText), "required is not an array of strings");
  if (required.length > MAX_NAMES) aboveLimit(`required has ${required.length} entries`);
  ascending(required, "container-34", "required");
  for (const [key, isValue] of Object.entries({ ignorable: isBytes, model: isText })) {
    const value = header[key];
    typed(value instanceof Map && [...value.values()].every(isValue), `${key} is not a map of its type`);
    ascending([...value.keys()], "container-10", key);
  }
  typed(isText(header.recipe), "recipe is not a string");
  integer(header.start, 0, MAX_TOKENS, "start");
  for (const [key, limit] of Object.entries({
    codecs: MAX_CODECS,
    layers: MAX_LAYERS,
    tensors: MAX_ENTRIES,
  })) {
    typed(Array.isArray(header[key]), `${key} is not an array`);
    if (header[key].length > limit) aboveLimit(`${key} has ${header[key].length} entries, at most ${limit}`);
  }
  header.codecs = header.codecs.map((codec) => {
    typed(codec instanceof Map, "an entry of codecs is not a map");
    return readCodec(codec, codecs);
  });
  checkCodecFeatures(header);
  header.layers = header.layers.map((layer, i) => readLayer(layer, i, header.codecs));
  header.states = readStates(header);
  header.starts = readStarts(header);
  header.end = rangeEnd(header);
  header.hidden = readHidden(header);
  header.offsets = readOffsets(header);
  header.metadata = readMetadata(header.ignorable.get("metadata"));
  if (!ofRow) header.tensors = readTensors(header);
  return header;
}

function checkCodecFeatures(header) {
  const features = [
    ["raw-positions", "container-55", (p) => p.raw_positions],
    ["token-scale-per-head", "container-61", (p) => p.token_scale?.endsWith("-per-head")],
    ["key-mean", "container-62", (p) => p.key_mean],
    ["balanced", "container-63", (p) => p.balanced],
    ["log-norms", "container-64", (p) => p.norm === "log8"],
  ];
  for (const [name, rule, uses] of features) {
    const required = header.required.includes(name);
    if (header.codecs.some(uses) !== required)
      badHeader(rule, `required ${required ? "has" : "lacks"} ${name}, unlike the codecs`);
  }
}

function readLayer(map, index, codecs) {
  checkKeys(map, ["k", "v"], `layer ${index}`);
  const layer = {};
  for (const which of ["k", "v"])
    layer[which] = map.get(which) === null ? null : readSide(map.get(which), which, index, codecs);
  const { k, v } = layer;
  if (k && v && k.batch !== v.batch)
    badHeader("container-13", `layer ${index}: the batch of k is ${k.batch}, that of v ${v.batch}`);
  if (k && v && k.length !== v.length)
    badHeader("container-14", `layer ${index}: k has ${k.length} tokens, v ${v.length}`);
  return layer;
}

function readSide(map, which, layer, codecs) {
  const what = `side ${layer}.${which}`;
  typed(map instanceof Map, `${what} is not a map`);
  const index = map.get("codec");
  typed(isInteger(index) && index < codecs.length, `${what}: codec is not the index of an entry of codecs`);
  const codec = codecs[index];
  const names = codec.streams.filter(([, , heads]) => heads === "entry").map(([name]) => name);
  checkKeys(map, names.length ? [...SIDE_KEYS, "entries"] : SIDE_KEYS, what);
  const number = (key, least, most) => integer(map.get(key), least, most, `${what}: ${key}`);
  const side = { which, layer, codec, dim: codec.dim, tailDtype: map.get("tail_dtype") };
  side.batch = number("batch", 1, MAX_BATCH);
  side.heads = number("heads", 1, MAX_HEADS);
  side.runs = map.get("runs");
  typed(Array.isArray(side.runs), `${what}: runs is not an array`);
  side.packed = 0;
  const limited = (tokens) => tokens > MAX_TOKENS && aboveLimit(`${what} has more than ${MAX_TOKENS} tokens`);
  for (const run of side.runs) {
    side.packed += integer(run, 1, MAX_TOKENS, `${what}: a run`);
    limited(side.packed);
  }
  side.tail = number("tail", 0, MAX_TOKENS);
  side.length = side.packed + side.tail;
  limited(side.length);
  typed(["bf16", "fp16", "fp32"].includes(side.tailDtype), `${what}: tail_dtype is not bf16, fp16 or fp32`);
  side.window = number("window", 0, MAX_TOKENS);
  if (side.window % codec.group)
    badHeader("container-15", `${what}: window ${side.window} is not a multiple of ${codec.group}`);
  const entries = map.get("entries");
  if (names.length) checkKeys(entries, names, `${what}: entries`);
  for (const name of names) integer(entries.get(name), 0, MAX_TOKENS, `${what}: entries of ${name}`);
  if (codec.ofHeads && codec.heads !== side.heads)
    badHeader("klt-10", `${what} has ${side.heads} heads, its codec widths of ${codec.heads}`);
  if (codec.key_mean && which === "v") badHeader("side-cars-14", `${what} has key_mean`);
  if (codec.group === 1 && side.runs.length > 1 && !codec.streams.some((stream) => stream[3] === "run"))
    badHeader("container-18", `${what} has ${side.runs.length} runs, and its codec encodes each token alone`);
  side.streams = sideStreams(side, entries);
  return side;
}

function sideStreams(side, entries) {
  const { codec } = side;
  side.groups = side.runs.reduce((sum, run) => sum + Math.ceil(run / codec.group), 0);
  const rows = { token: side.packed, group: side.groups, run: side.runs.length };
  const streams = codec.streams.map(([stream, dtype, heads, kind, ...sizes]) => {
    const first = [heads === "entry" ? 1 : side.batch, heads === "all" ? side.heads : 1];
    const count = kind === "entry" ? entries.get(stream) : rows[kind];
    const rest = sizes.map((size) => (size === "heads" ? side.heads : size));
    return { stream, dtype, shape: [...first, count, ...rest] };
  });
  const tail = [side.batch, side.heads, side.tail, side.dim];
  if (side.tail) streams.push({ stream: "tail", dtype: DTYPES[side.tailDtype], shape: tail });
  for (const entry of streams) entry.name = `${side.layer}.${side.which}.${entry.stream}`;
  return streams;
}

// The records of a feature that has a name and bytes, null without it. `rules`: those that `required` without
// bytes, or bytes without it, and bytes of another form break.
function records(header, name, width, [pairing, form], count = null) {
  const bytes = header.ignorable.get(name);
  if (header.required.includes(name) !== (bytes !== undefined))
    badHeader(pairing, `required and ignorable do not both have ${name}`);
  if (!bytes) return null;
  const { length } = bytes;
  if (count === null ? length === 0 || length % width : length !== count * width)
    badHeader(form, `${name} has ${length} bytes, not records of ${width}`);
  return Array.from({ length: length / width }, (_, i) => bytes.subarray(i * width, (i + 1) * width));
}

export const sidesOf = (layer) => [layer.k, layer.v].filter(Boolean);

function readStarts(header) {
  const { layers, start } = header;
  const found = records(header, "layer-positions", 8, ["container-35", "container-36"], layers.length);
  if (!found) return layers.map(() => start);
  const starts = layers.map((layer, i) => {
    const value = littleEndian(found[i], 0, 8);
    if (value > MAX_TOKENS) aboveLimit(`the start of layer ${i} is ${value}`);
    if (value < start) badHeader("container-37", `the start of layer ${i} is ${value}, before ${start}`);
    if (!sidesOf(layer).length && Number(value) !== start)
      badHeader("container-38", `layer ${i} has no sides, and the start ${value}`);
    return Number(value);
  });
  if (starts.every((value) => value === start))
    badHeader("container-39", "layer-positions has the start of the file for every layer");
  return starts;
}

function rangeEnd({ layers, start, starts }) {
  const sides = layers.flatMap(sidesOf);
  return sides.reduce((end, { layer, length }) => Math.max(end, starts[layer] + length), start);
}

const STATE_DTYPES = ["U8", "U16", "F16", "BF16", "F32"];

function readStates(header) {
  const found = records(header, "layer-state", 96, ["container-41", "container-42"]) ?? [];
  const states = found.map((record) => readState(record, header.layers));
  states.forEach((state, i) => {
    const before = states[i - 1];
    if (before && (before.layer > state.layer || (before.layer === state.layer && before.key >= state.key)))
      badHeader("container-45", `the records of states are not in order at ${state.name}`);
    const [batch] = state.shape;
    const others = sidesOf(header.layers[state.layer]).map((side) => side.batch);
    if (before?.layer === state.layer) others.push(before.shape[0]);
    if (others.some((other) => other !== batch))
      badHeader("container-46", `${state.name} has ${batch} sequences, unlike others of its layer`);
  });
  return states;
}

function readState(record, layers) {
  const layer = Number(littleEndian(record, 0, 2));
  const rank = record[3];
  const [key] = String.fromCharCode(...record.subarray(68)).split("\0");
  const sizes = Array.from({ length: 8 }, (_, i) => littleEndian(record, 4 + 8 * i, 8));
  const named = /^[a-z][a-z0-9_.]*$/.test(key) && isZero(record.subarray(68 + key.length));
  const sized = rank >= 1 && rank <= 8 && sizes.every((size, i) => size > 0n === i < rank);
  if (record[2] >= STATE_DTYPES.length || !named || !sized)
    badHeader("container-43", `a record of a state of layer ${layer} is not of its form`);
  sizes.slice(0, rank).forEach((size, i) => {
    if (size > (i ? MAX_TOKENS : MAX_BATCH)) aboveLimit(`a size of the state ${layer}.${key} is ${size}`);
  });
  if (layer >= layers.length)
    badHeader("container-44", `a state of layer ${layer}, of ${layers.length} layers`);
  const shape = sizes.slice(0, rank).map(Number);
  return { layer, key, name: `${layer}.state.${key}`, dtype: STATE_DTYPES[record[2]], shape };
}

function batches(header) {
  return [
    ...header.layers.flatMap(sidesOf).map((side) => side.batch),
    ...header.states.map((state) => state.shape[0]),
  ];
}

function readHidden(header) {
  const found = records(header, "hidden-tokens", 20, ["container-49", "container-50"]) ?? [];
  const fewest = Math.min(...batches(header));
  const hidden = [];
  for (const record of found) {
    const sequence = Number(littleEndian(record, 0, 4));
    const [from, to] = [littleEndian(record, 4, 8), littleEndian(record, 12, 8)];
    if (sequence >= fewest) badHeader("container-51", `hidden-tokens has the sequence ${sequence}`);
    if (from >= to || from < header.start || to > header.end)
      badHeader("container-52", `hidden-tokens has the stretch ${from} to ${to}`);
    const before = hidden.at(-1);
    if (before && (before[0] > sequence || (before[0] === sequence && before[2] >= from)))
      badHeader("container-53", `hidden-tokens is not in order at ${from}`);
    hidden.push([sequence, Number(from), Number(to)]);
  }
  return hidden;
}

function readOffsets(header) {
  const found = records(header, "position-offsets", 8, ["container-56", "container-57"]);
  if (!found) return null;
  if (batches(header).some((batch) => batch !== found.length))
    badHeader("container-58", `position-offsets is for ${found.length} sequences`);
  return found.map((record) => {
    const offset = BigInt.asIntN(64, littleEndian(record, 0, 8));
    const position = BigInt(header.end) + offset;
    if (position < 0n) badHeader("container-59", `the offset ${offset} leads to the position ${position}`);
    if (position > MAX_TOKENS) aboveLimit(`the offset ${offset} leads to the position ${position}`);
    return Number(offset);
  });
}

// The entries of `metadata` as a Map, or null for bytes of another form.
function readMetadata(bytes) {
  if (bytes === undefined) return null;
  const result = new Map();
  const data = viewOf(bytes);
  let before = null;
  for (let at = 0; at < bytes.length;) {
    const length = bytes[at++];
    if (length === 0 || at + length + 1 > bytes.length || result.size === MAX_NAMES) return null;
    const name = decodeUtf8(bytes.subarray(at, at + length));
    at += length;
    if (name === null || (before !== null && compareText(before, name) >= 0)) return null;
    before = name;
    const type = bytes[at++];
    if (type > 2 || at + (type ? 8 : 4) > bytes.length) return null;
    let value;
    if (type === 0) {
      const size = data.getUint32(at, true);
      at += 4;
      if (size > MAX_STRING_BYTES || at + size > bytes.length) return null;
      value = decodeUtf8(bytes.subarray(at, at + size));
      at += size;
      if (value === null) return null;
    } else {
      value = type === 1 ? data.getBigInt64(at, true) : data.getFloat64(at, true);
      at += 8;
      if (type === 2 && !Number.isFinite(value)) return null;
    }
    result.set(name, value);
  }
  return result;
}

function expectedTensors(header) {
  const byLayer = header.layers.map((layer) => sidesOf(layer).flatMap((side) => side.streams));
  for (const state of header.states) byLayer[state.layer].push(state);
  return byLayer.flat();
}

export function byteSize(tensor) {
  return tensor.shape.reduce((product, size) => product * BigInt(size), BigInt(WIDTHS[tensor.dtype]));
}

function readTensors(header) {
  const expected = expectedTensors(header);
  header.tensors.forEach((entry, i) => {
    const wrong = (what) => badHeader("container-11", `tensor ${i}${what}`);
    if (!Array.isArray(entry) || entry.length !== 6) wrong(" is not an array of 6");
    const [name, dtype, shape, filter, stored, digest] = entry;
    if (!isText(name) || !isText(dtype)) wrong(": its name or dtype is not a string");
    if (!Array.isArray(shape) || !shape.every(isInteger)) wrong(": its shape is not an array of integers");
    if (filter !== "none" && filter !== "zstd") wrong(": its filter is not none or zstd");
    if (!isInteger(stored)) wrong(": its stored bytes are not an integer");
    if (!isBytes(digest) || digest.length !== 16) wrong(": its digest is not 16 bytes");
  });
  const count = header.tensors.length;
  if (count !== expected.length)
    badHeader("container-16", `the header lists ${count} tensors, and its layers have ${expected.length}`);
  return expected.map((tensor, i) => {
    const [name, dtype, shape, filter, stored, digest] = header.tensors[i];
    if (name !== tensor.name || dtype !== tensor.dtype || shape.join() !== tensor.shape.join())
      badHeader("container-16", `tensor ${i}, ${quoted(name)}, is not as ${tensor.name} has to be`);
    const size = byteSize(tensor);
    if (filter === "none" && BigInt(stored) !== size)
      badHeader("container-17", `${tensor.name} takes ${size} bytes, and is listed with ${stored}`);
    return Object.assign(tensor, { filter, stored: BigInt(stored), size, digest });
  });
}

// The token ids that a header has: { shared, rows }; `rows` are those of each sequence after the shared ones,
// or null.
export function tokenIds(header) {
  const { ignorable } = header;
  const joined = (prefix) => {
    const parts = [];
    for (let i = 0; ignorable.has(`${prefix}.${i}`); i++) parts.push(ignorable.get(`${prefix}.${i}`));
    return concat(...parts);
  };
  const u32 = (bytes, at) => Number(littleEndian(bytes, at, 4));
  const ids = (bytes, at, count) => Array.from({ length: count }, (_, i) => u32(bytes, at + 4 * i));
  const inputs = ignorable.get("inputs");
  let shared = [];
  if (inputs && inputs.length >= 8) {
    const count = littleEndian(inputs, 0, 8);
    if (count * 4n <= BigInt(inputs.length - 8)) shared = ids(inputs, 8, Number(count));
  }
  const more = joined("token-ids");
  if (more.length % 4 === 0 && more.length >= 4 * shared.length) {
    const all = ids(more, 0, more.length / 4);
    if (shared.every((id, i) => id === all[i])) shared = all;
  }
  const bytes = joined("row-ids");
  if (bytes.length < 12) return { shared, rows: null };
  const sequences = u32(bytes, 0);
  const count = Number(littleEndian(bytes, 4, 8));
  const fits = sequences * count * 4 === bytes.length - 12 && batches(header).every((b) => b === sequences);
  const row = (i) => ids(bytes, 12 + 4 * i * count, count);
  return { shared, rows: fits ? Array.from({ length: sequences }, (_, i) => row(i)) : null };
}

// What a basis has to have (basis.md, File and Frames).
export function checkBasisHeader(header) {
  header.layers.forEach((layer, i) => {
    for (const side of sidesOf(layer)) {
      if (side.codec.id !== "raw" || side.codec.dtype === "bf16")
        badHeader("basis-1", `layer ${i} of the basis has the codec ${side.codec.id}`);
      if (side.batch !== 1 || side.tail)
        badHeader("basis-2", `layer ${i} of the basis has a batch of ${side.batch}, a tail of ${side.tail}`);
      const rows = 2 + side.dim + Math.ceil((510 * Math.ceil(side.dim / 16)) / side.dim);
      if (side.length < rows)
        badHeader("basis-3", `layer ${i} of the basis has ${side.length} rows of ${rows}`);
    }
    const own = header.states.filter((state) => state.layer === i);
    const states = new Map(own.map((state) => [state.key, state]));
    for (const which of ["k", "v"]) checkFrames(states, which, layer[which], i);
    checkBalanced(states, layer.k, i);
    checkRope(states, layer.k, i);
    if (i === 0) checkTables(states, header.states);
  });
}

const shaped = (state, dtypes, shape) => dtypes.includes(state.dtype) && state.shape.join() === shape.join();

function checkFrames(states, which, side, layer) {
  const frames = states.get(`${which}.frames`);
  const scales = states.get(`${which}.scales`);
  if (!frames && !scales) return;
  if (!frames || !scales || !side)
    badHeader("basis-8", `layer ${layer} of the basis lacks frames, scales or rows of ${which}`);
  const right = (count, n) =>
    shaped(frames, ["F16", "F32"], [1, count, 1 + n, n]) && shaped(scales, ["U8"], [1, count, n]);
  if (!right(side.heads, side.dim) && !right(1, side.heads * side.dim))
    badHeader("basis-9", `frames or scales of ${which} of layer ${layer} have another dtype or shape`);
}

function checkBalanced(states, side, layer) {
  const found = ["k.balanced", "k.centered", "k.queries", "k.mean"].filter((key) => states.has(key));
  if (!found.length) return;
  if (!states.has("k.balanced") && !states.has("k.centered"))
    badHeader("basis-21", `layer ${layer} of the basis has ${found[0]} without balanced frames`);
  const [, h, n] = states.get(found[0]).shape;
  const [heads, dim] = side ? [side.heads, side.dim] : [h, n];
  for (const key of found) {
    const shape = key === "k.mean" ? [1, heads, dim] : [1, heads, dim, dim];
    const dtypes = key === "k.balanced" || key === "k.centered" ? ["F16", "F32"] : ["F32"];
    if (!(dim <= 1024) || !shaped(states.get(key), dtypes, shape))
      badHeader("basis-22", `${key} of layer ${layer} of the basis has another dtype or shape`);
  }
}

function checkRope(states, side, layer) {
  const found = ["rope.halves", "rope.neighbours"].filter((key) => states.has(key));
  if (found.length > 1) badHeader("basis-12", `layer ${layer} of the basis has both pairings of RoPE`);
  if (!found.length) return;
  const state = states.get(found[0]);
  const dim = side?.dim ?? (states.get("k.balanced") ?? states.get("k.centered"))?.shape[2] ?? 0;
  if (!shaped(state, ["F32"], [1, state.shape[1]]) || 2 * state.shape[1] > dim)
    badHeader("basis-13", `${found[0]} of layer ${layer} of the basis has another dtype or shape`);
}

function checkTables(states, all) {
  const frequencies = states.get("table.frequencies");
  const values = states.get("table.values");
  if (!frequencies && !values && !all.some(({ key }) => key === "k.frames" || key === "v.frames")) return;
  if (!frequencies || !values)
    badHeader("basis-10", "a basis with frames or tables lacks one of the tables in layer 0");
  const [, count, symbols] = frequencies.shape;
  const sizes = count >= 1 && count <= 64 && symbols >= 4 && symbols <= 256 && symbols % 2 === 0;
  const shapes =
    shaped(frequencies, ["U16"], [1, count, symbols]) && shaped(values, ["F16"], [1, count, symbols - 1]);
  if (!sizes || !shapes) badHeader("basis-11", "the tables of the basis have another dtype or shape");
}
