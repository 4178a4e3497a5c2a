// Packed pages: pages of serving engines (row.md).
import { decodeSide } from "./decode.js";
import { KvpackError, badHeader, digestMismatch, need, notKvpack, truncated, unsupported } from "./errors.js";
import { byteSize, readHeader, sidesOf } from "./header.js";
import { parse } from "./msgpack.js";
import { concat, hex, isZero, littleEndian, sha256 } from "./numbers.js";
import { isCodec } from "./parameters.js";
import { lengthPrefixed } from "./store.js";
import { rowChecksum } from "./xxhash.js";

const FRAME = 128;
const BEGINNING = "kvpack-row 1\n\0\0\0";
const FEATURES = ["balanced", "key-mean", "log-norms", "raw-positions", "token-scale-per-head"];
const PAGE_DTYPES = ["bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "u8"];
const padded = (size) => Math.ceil(size / 64) * 64;
const restrict = (kept, what) => need(kept, "row-3", what);

function checkBeginning(bytes) {
  if (bytes.length < FRAME) truncated("row-1", `a row of ${bytes.length} bytes`);
  const beginning = String.fromCharCode(...bytes.subarray(0, 16));
  if (beginning === BEGINNING) return;
  if (beginning.startsWith("kvpack-row ")) unsupported("row-1", "the row is of another version");
  notKvpack("row-1", "the first bytes are not those of a row");
}

function readDescription(bytes) {
  try {
    const { map, fault } = parse(bytes);
    fault?.();
    const header = readHeader(map, isCodec, true);
    header.sides = header.layers.flatMap(sidesOf);
    checkDescription(header);
    return header;
  } catch (error) {
    if (!(error instanceof KvpackError)) throw error;
    return badHeader(error.rule.startsWith("row-") ? error.rule : "row-3", error.message);
  }
}

function checkDescription(header) {
  const { layers, sides, ignorable } = header;
  const known = header.required.every((name) => FEATURES.includes(name));
  restrict(known && !header.tensors.length, "the description has tensors, or a feature that no row has");
  restrict(header.start === 0 && header.model.size === 0, "the description has a start or a model");
  const dtype = ignorable.get("page-dtype");
  restrict(ignorable.size === 1 && dtype, "the description has other entries than page-dtype");
  header.pageDtype = String.fromCharCode(...dtype);
  restrict(PAGE_DTYPES.includes(header.pageDtype), "page-dtype is not one of its dtypes");
  restrict(layers.length > 0 && layers.every(({ k }) => k), "a layer has no k, or there is none");
  restrict(!layers.some(({ v }) => !v !== !layers[0].v), "some layers have v, and others do not");
  for (const { codec, batch, runs, tail, window, heads, packed } of sides) {
    restrict(batch === 1 && runs.length === 1 && !tail && !window, "a side has no form of rows");
    restrict(heads === sides[0].heads && packed === sides[0].packed, "sides differ in heads or tokens");
    const items = codec.streams.filter((stream) => stream.heads === "item").map(({ name }) => name);
    restrict(!items.some((name) => !/^raw_(positions|values)$/.test(name)), `a side has items: ${items}`);
    need(header.pageDtype !== "u8" || codec.id === "opaque", "row-6", "a page of u8 has another codec");
  }
}
// Reads and checks the row at the beginning of memory. decodeRow() returns its values.
export function readRow(memory) {
  checkBeginning(memory);
  const size = Number(littleEndian(memory, 16, 8));
  need(size >= FRAME && size <= 2 ** 32 - 64 && size % 64 === 0, "row-2", `the row has ${size} bytes`);
  if (size > memory.length) truncated("row-2", `the row has ${size} bytes, and ${memory.length} are at hand`);
  const row = memory.subarray(0, size);
  if (rowChecksum(row) !== littleEndian(row, 24, 8)) digestMismatch("row-4", "the row is damaged");
  const length = Number(littleEndian(row, 96, 4));
  restrict(isZero(row.subarray(100, FRAME)), "spare bytes of the frame are not 0");
  restrict(FRAME + length <= size, "the description does not end within the row");
  const description = row.slice(FRAME, FRAME + length);
  const header = readDescription(description);
  let at = FRAME;
  const take = (count) => {
    const [from, end] = [at, at + count];
    at += padded(count);
    need(at <= size, "row-2", "the row ends before its streams do");
    restrict(isZero(row.subarray(end, at)), "padding is not 0");
    return row.subarray(from, end);
  };
  take(length);
  const pair = (stream) => [stream.stream, take(Number(byteSize(stream)))];
  const streams = header.sides.map((side) => new Map(side.streams.map(pair)));
  need(at === size, "row-2", `the row has ${size} bytes, and its streams end at ${at}`);
  const { sides } = header;
  return { header, sides, streams, description, namespace: row.slice(32, 64), key: row.slice(64, 96) };
}
// The values of the sides of a row, binary32 [1, head, token, channel], in the order of `sides`.
export function decodeRow({ sides, streams }, bases = new Map()) {
  const range = ({ heads, packed }) => ({ batch: [0, 1], heads: [0, heads], tokens: [0, packed] });
  return sides.map((side, i) => decodeSide(side, streams[i], bases, range(side)));
}
// The name of a row as an entry of a prefix store, in hexadecimal.
export async function rowEntryKey({ namespace, key, description }) {
  const parts = [new TextEncoder().encode("kvpack-page 2"), namespace, key, description];
  return hex(await sha256(concat(...parts.map(lengthPrefixed))));
}
