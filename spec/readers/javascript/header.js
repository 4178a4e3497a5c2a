// The header map: fields, sides and tensors (container.md, Fields to Tensors and alignment).
import { limit, need, quoted, unknownCodec, unsupported } from "./errors.js";
import { FEATURES, readFeatures } from "./features.js";
import { dtypeOf, readCodec } from "./parameters.js";
import { WIDTHS, isInteger } from "./numbers.js";
import { MAX_TOKENS, isBytes, isMap, isText, list, readMap, schema, typeOf } from "./schema.js";

// Refuses newer files before any other check. The map may be any valid msgpack.
export function refuseNew(map, isKnown) {
  const format = map.get("format");
  if (isInteger(format) && format > 1)
    unsupported("container-32", `the file has format ${format}; this reader knows format 1`);
  const all = (key) => (Array.isArray(map.get(key)) ? map.get(key) : []);
  for (const name of all("required").filter(isText))
    if (!FEATURES.includes(name)) unsupported("container-7", `the feature ${quoted(name)} is unknown`);
  for (const id of all("codecs").map((codec) => isMap(codec) && codec.get("id")))
    if (isText(id) && !isKnown(id)) unknownCodec("container-12", `the codec ${quoted(id)} is unknown`);
}
const HEADER = schema(
  "format:1 required:names ignorable:blobs model:texts recipe:text start:tokens codecs layers:codecs tensors",
);
const SIDE = schema(
  "codec:integer batch:1..65536! heads:1..65536! runs tail:tokens tail_dtype:bf16|fp16|fp32 window:tokens",
);
const LAYER = schema("k:any v:any");
// Check the map of a header; `isKnown(id)`: whether the reader knows a codec; `ofRow`: a row's description.
export function readHeader(map, isKnown, ofRow = false) {
  const header = readMap(map, HEADER, "the header");
  header.codecs = header.codecs.map((codec) => readCodec(codec, isKnown));
  header.layers = header.layers.map((layer, i) => readLayer(layer, i, header.codecs));
  readFeatures(header);
  if (!ofRow) header.tensors = readTensors(header);
  return header;
}
export const sidesOf = (layer) => [layer.k, layer.v].filter(Boolean);

function readLayer(map, index, codecs) {
  const what = `layer ${index}`;
  const { k, v } = readMap(map, LAYER, what);
  const side = (value, which) => (value === null ? null : readSide(value, which, index, codecs));
  const layer = { k: side(k, "k"), v: side(v, "v") };
  if (!layer.k || !layer.v) return layer;
  const { k: one, v: other } = layer;
  need(one.batch === other.batch, "container-13", `${what}: batches of ${one.batch} and ${other.batch}`);
  need(one.length === other.length, "container-14", `${what}: ${one.length} and ${other.length} tokens`);
  return layer;
}

function readSide(map, which, layer, codecs) {
  const what = `side ${layer}.${which}`;
  const codec = codecs[isMap(map) && isInteger(map.get("codec")) ? Number(map.get("codec")) : -1];
  need(codec, "container-11", `${what}: codec is not the index of an entry of codecs`);
  const items = codec.streams.filter(({ heads }) => heads === "item").map(({ name }) => name);
  const side = readMap(map, items.length ? { ...SIDE, entries: isMap } : SIDE, what);
  const { runs, window } = side;
  const packed = runs.reduce((sum, run) => sum + run, 0);
  Object.assign(side, { which, layer, codec, packed, dim: codec.dim, length: packed + side.tail });
  limit(side.length, MAX_TOKENS, `tokens of ${what}`);
  need(window % codec.group === 0, "container-15", `${what}: window ${window} is not whole groups`);
  const counts = Object.fromEntries(items.map((name) => [name, typeOf("tokens")]));
  if (items.length) readMap(side.entries, counts, `${what}: entries`);
  const fits = !codec.ofHeads || codec.heads === side.heads;
  need(fits, "klt-10", `${what} has ${side.heads} heads, its codec widths of ${codec.heads}`);
  need(!codec.key_mean || which === "k", "side-cars-14", `${what} has key_mean`);
  const single = codec.group > 1 || runs.length <= 1 || codec.streams.some((one) => one.rows === "run");
  need(single, "container-18", `${what} has ${runs.length} runs, and its codec encodes each token alone`);
  side.streams = sideStreams(side);
  return side;
}

function sideStreams(side) {
  const { codec, batch, heads } = side;
  side.groups = side.runs.reduce((sum, run) => sum + Math.ceil(run / codec.group), 0);
  const rows = { token: side.packed, group: side.groups, run: side.runs.length };
  const streams = codec.streams.map(({ name: stream, dtype, heads: of, rows: kind, sizes }) => {
    const count = rows[kind] ?? side.entries.get(stream);
    const first = [of === "item" ? 1 : batch, of === "all" ? heads : 1, count];
    return { stream, dtype, shape: [...first, ...sizes.map((size) => (size === "heads" ? heads : size))] };
  });
  const shape = [batch, heads, side.tail, side.dim];
  if (side.tail) streams.push({ stream: "tail", dtype: dtypeOf(side, "tail_dtype"), shape });
  for (const entry of streams) entry.name = `${side.layer}.${side.which}.${entry.stream}`;
  return streams;
}
export const byteSize = ({ shape, dtype }) =>
  shape.reduce((product, size) => product * BigInt(size), BigInt(WIDTHS[dtype]));
const TENSOR = [isText, isText, list(isInteger, 131072), typeOf("none|zstd"), isInteger];
TENSOR.push((value) => isBytes(value) && value.length === 16);

function readTensors({ layers, states, tensors }) {
  const ofLayer = (index) => states.filter(({ layer }) => layer === index);
  const ofSides = (layer) => sidesOf(layer).flatMap((side) => side.streams);
  const expected = layers.flatMap((layer, i) => [...ofSides(layer), ...ofLayer(i)]);
  tensors.forEach((entry, i) => {
    const typed = entry.length === 6 && entry.every((value, at) => TENSOR[at](value, `tensor ${i}`));
    need(typed, "container-11", `tensor ${i} is not as its table says`);
  });
  const [found, count] = [tensors.length, expected.length];
  need(found === count, "container-16", `the header lists ${found} tensors, and its layers have ${count}`);
  return expected.map((tensor, i) => {
    const [name, dtype, shape, filter, stored, digest] = tensors[i];
    const same = name === tensor.name && dtype === tensor.dtype && shape.join() === tensor.shape.join();
    need(same, "container-16", `tensor ${i}, ${quoted(name)}, is not as ${tensor.name} has to be`);
    const size = byteSize(tensor);
    const whole = filter === "zstd" || BigInt(stored) === size;
    need(whole, "container-17", `${name} takes ${size} bytes, and is listed with ${stored}`);
    return Object.assign(tensor, { filter, stored: BigInt(stored), size, digest });
  });
}
