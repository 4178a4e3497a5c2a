// Rows: pages of serving engines (row.md).

import { decodeSide } from "./decode.js";
import { KvpackError, badHeader, digestMismatch, notKvpack, truncated, unsupported } from "./errors.js";
import { byteSize, readHeader, sidesOf } from "./header.js";
import { concat, hex, isZero, littleEndian, sha256 } from "./numbers.js";
import { lengthPrefixed } from "./store.js";
import { rowChecksum } from "./xxhash.js";

const FRAME = 128;
const BEGINNING = "kvpack-row 1\n\0\0\0";
const FEATURES = ["balanced", "key-mean", "log-norms", "raw-positions", "token-scale-per-head"];
const PAGE_DTYPES = ["bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "u8"];
const padded = (size) => Math.ceil(size / 64) * 64;
const restrict = (condition, what) => condition || badHeader("row-3", what);

function checkBeginning(bytes) {
  if (bytes.length < FRAME) truncated("row-1", `a row of ${bytes.length} bytes`);
  const beginning = String.fromCharCode(...bytes.subarray(0, 16));
  if (beginning === BEGINNING) return;
  if (beginning.startsWith("kvpack-row ")) unsupported("row-1", "the row is of another version");
  notKvpack("row-1", "the first bytes are not those of a row");
}

function readDescription(bytes) {
  let header;
  try {
    header = readHeader(bytes, () => true, true);
  } catch (error) {
    if (error instanceof KvpackError)
      badHeader(error.rule.startsWith("row-") ? error.rule : "row-3", error.message);
    throw error;
  }
  const known = header.required.every((name) => FEATURES.includes(name));
  restrict(known, "the description has a feature that no row has");
  restrict(header.tensors.length === 0, "the description lists tensors");
  restrict(header.start === 0 && header.model.size === 0, "the description has a start or a model");
  const dtype = header.ignorable.get("page-dtype");
  restrict(header.ignorable.size === 1 && dtype, "the description has other entries than page-dtype");
  header.pageDtype = String.fromCharCode(...dtype);
  restrict(PAGE_DTYPES.includes(header.pageDtype), "page-dtype is not one of its dtypes");
  const { layers } = header;
  restrict(layers.length > 0 && layers.every(({ k }) => k), "a layer has no k, or there is none");
  const values = layers.filter(({ v }) => v).length;
  restrict(values === 0 || values === layers.length, "some layers have v, and others do not");
  const sides = layers.flatMap(sidesOf);
  for (const side of sides) {
    const plain = side.batch === 1 && side.runs.length === 1 && !side.tail && !side.window;
    restrict(plain, "a side has another form than those of rows");
    const alike = side.heads === sides[0].heads && side.packed === sides[0].packed;
    restrict(alike, "sides have different heads or tokens");
    const entries = side.codec.streams.filter(([, , heads]) => heads === "entry").map(([name]) => name);
    const other = entries.find((name) => !/^raw_(positions|values)$/.test(name));
    restrict(!other, `a side has the stream ${other} with a row per entry`);
    if (header.pageDtype === "u8" && side.codec.id !== "opaque")
      badHeader("row-6", "a page of u8 has a codec that is not opaque");
  }
  return { header, sides };
}

// Read a row from memory that begins with it: { header, namespace, key, description, sides }, every check
// made. Values come from decodeRow(). What follows the row in the same memory is no part of it.
export function readRow(memory) {
  checkBeginning(memory);
  const size = Number(littleEndian(memory, 16, 8));
  if (size < FRAME || size > 2 ** 32 - 64 || size % 64) badHeader("row-2", `the row has ${size} bytes`);
  if (size > memory.length) truncated("row-2", `the row has ${size} bytes, and ${memory.length} are at hand`);
  const row = memory.subarray(0, size);
  if (rowChecksum(row) !== littleEndian(row, 24, 8))
    digestMismatch("row-4", "the row does not have its checksum");
  const length = Number(littleEndian(row, 96, 4));
  restrict(isZero(row.subarray(100, FRAME)), "spare bytes of the frame are not 0");
  restrict(FRAME + length <= size, "the description does not end within the row");
  const description = row.slice(FRAME, FRAME + length);
  const { header, sides } = readDescription(description);
  let at = FRAME + padded(length);
  const zero = (from, to) => restrict(isZero(row.subarray(from, to)), "padding is not 0");
  zero(FRAME + length, at);
  const streams = sides.map((side) => {
    const bytes = new Map();
    for (const stream of side.streams) {
      const end = at + Number(byteSize(stream));
      if (end > size) badHeader("row-2", "the row ends before its streams do");
      bytes.set(stream.stream, row.subarray(at, end));
      at = at + padded(end - at);
      zero(end, at);
    }
    return bytes;
  });
  if (at !== size) badHeader("row-2", `the row has ${size} bytes, and its streams end at ${at}`);
  return { header, sides, streams, description, namespace: row.slice(32, 64), key: row.slice(64, 96) };
}

// The values of the sides of a row, binary32 [1, head, token, channel], in the order of `sides`.
export function decodeRow({ sides, streams }, bases = new Map()) {
  return sides.map((side, i) =>
    decodeSide(side, streams[i], bases, { batch: [0, 1], heads: [0, side.heads], tokens: [0, side.packed] }),
  );
}

// The name of a row as an entry of a prefix store, in hexadecimal.
export async function rowEntryKey({ namespace, key, description }) {
  const parts = [new TextEncoder().encode("kvpack-page 2"), namespace, key, description];
  return hex(await sha256(concat(...parts.map(lengthPrefixed))));
}
