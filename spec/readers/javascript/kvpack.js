// A reader of kvpack 1 of the profile full, for browsers and Node, written from the pages of spec/.
// A source is anything with `size` and an asynchronous `read(from, to)` that returns a Uint8Array.
import { Basis, checkBasisHeader } from "./basis.js";
import { decodeSide } from "./decode.js";
import * as errors from "./errors.js";
import { tokenIds } from "./features.js";
import { byteSize, readHeader, refuseNew, sidesOf } from "./header.js";
import { parse } from "./msgpack.js";
import { ascii, equalBytes, finite, hex, isZero, sha256, viewOf } from "./numbers.js";
import { isCodec } from "./parameters.js";
import { Digest, xxh3 } from "./xxhash.js";
import { decompress } from "./zstd.js";

export const { KvpackError } = errors;
const { digestMismatch, limit, must, need, notKvpack, truncated, unsupported } = errors;
const START = '{"__metadata__":{"format":"kvpack","kvpack":"';
const [MAX_JSON_BYTES, MAX_HEADER_BYTES, MAX_FILE_BYTES] = [16777216, 8388608, 2n ** 60n - 1n];
const PIECE = 8388608;
const isKnown = (id) => id !== "opaque" && isCodec(id);

export function fromBytes(bytes) {
  return { size: bytes.length, read: async (from, to) => bytes.slice(from, to) };
}

export function fromBlob(blob) {
  const read = async (from, to) => new Uint8Array(await blob.slice(from, to).arrayBuffer());
  return { size: blob.size, read };
}

async function readExactly(source, from, to, rule = "container-4") {
  if (to > source.size) truncated(rule, `the file has ${source.size} bytes, and ${to} are needed`);
  const bytes = await source.read(from, to);
  if (bytes.length !== to - from) truncated(rule, `the file ended at byte ${from + bytes.length}`);
  return bytes;
}
// The major number at the beginning of a JSON header.
function checkMajor(text, size) {
  if (!text.startsWith(START)) notKvpack("container-5", "the bytes from 8 on are not those of a kvpack file");
  const [, major, next] = /^([1-9][0-9]{0,8})?(.?)/s.exec(text.slice(START.length));
  if (next === "" && size < 8 + START.length + 10) truncated("container-4", "the major number is cut short");
  need(major && (next === " " || next === '"'), "container-5", "the major number is not a number");
  if (major !== "1") unsupported("container-6", `the file is of version ${major}, not of version 1`);
}
// The digest and the size of kvpack.header, from the beginning of the JSON header.
function readPlace(text) {
  const form = /^1 ([0-9a-f]{32})"\},"kvpack\.header":\{"dtype":"U8","shape":\[(0|[1-9][0-9]{0,6})\](.*)/s;
  const [, digest, size, rest] = form.exec(text.slice(START.length)) ?? [];
  need(digest, "container-5", "the JSON header does not begin as its form says");
  limit(Number(size), MAX_HEADER_BYTES, "bytes of kvpack.header");
  need(rest.startsWith(`,"data_offsets":[0,${size}]}`), "container-5", "the JSON header has another form");
  return { digest, size: Number(size) };
}
// Computes the offsets of tensors in the data section as BigInt, and returns their end.
function placeTensors(tensors, headerBytes) {
  let end = BigInt(headerBytes);
  for (const tensor of tensors) {
    tensor.offset = (end + 63n) & ~63n;
    tensor.pad = Number(tensor.offset - end);
    end = tensor.offset + tensor.stored;
  }
  return end;
}

function jsonHeader(tensors, digest, headerBytes) {
  const entry = (name, dtype, shape, from, to) =>
    `"${name}":{"dtype":"${dtype}","shape":[${shape}],"data_offsets":[${from},${to}]}`;
  const parts = [`${START}1 ${digest}"}`, entry("kvpack.header", "U8", headerBytes, 0, headerBytes)];
  let pads = 0;
  for (const { name, dtype, shape, filter, stored, offset, pad } of tensors) {
    if (pad) parts.push(entry(`kvpack.pad.${pads++}`, "U8", pad, offset - BigInt(pad), offset));
    const [type, sizes] = filter === "zstd" ? ["U8", stored] : [dtype, shape];
    parts.push(entry(name, type, sizes, offset, offset + stored));
  }
  const text = `${parts.join()}}`;
  return text + " ".repeat((4096 - ((8 + text.length) % 4096)) % 4096);
}
// Open a file, all checks up to its size made. options.limit: bytes of decoded values at once, or 4 GiB.
export async function open(source, options = {}) {
  const head = await source.read(0, Math.min(source.size, 8192));
  const text = ascii(head.subarray(8));
  checkMajor(text, source.size);
  const length = viewOf(head).getBigUint64(0, true);
  limit(length, MAX_JSON_BYTES, "bytes of the JSON header");
  const start = 8 + Number(length);
  if (start > source.size) truncated("container-4", "the file ends before its JSON header");
  need(start % 4096 === 0, "container-3", `the JSON header ends at byte ${start}, not at a multiple of 4096`);
  const { digest, size } = readPlace(text);
  const bytes = await readExactly(source, start, start + size);
  checkDigest("kvpack.header", hex(xxh3(bytes)), digest);
  const { map, fault } = parse(bytes);
  refuseNew(map, isKnown);
  fault?.();
  const header = readHeader(map, isKnown);
  const end = BigInt(start) + placeTensors(header.tensors, size);
  const json = new TextEncoder().encode(jsonHeader(header.tensors, digest, size));
  need(equalBytes(await readExactly(source, 8, start), json), "container-5", "the JSON header is another");
  limit(end, MAX_FILE_BYTES, "bytes of the file");
  if (BigInt(source.size) !== end) truncated("container-4", `${source.size} bytes of a file of ${end}`);
  if (header.required.includes("basis")) checkBasisHeader(header);
  return new KvpackFile(source, header, start, options);
}
const checkDigest = (name, found, digest) =>
  found === digest || digestMismatch("container-20", `${name} is damaged: it has another digest`);

export class KvpackFile {
  constructor(source, header, dataStart, options) {
    Object.assign(this, { source, header, dataStart, limit: options.limit ?? 2 ** 32 });
    Object.assign(this, { layers: header.layers, isBasis: header.required.includes("basis") });
  }
  // The digests of the bases that the file's sides need.
  get basisDigests() {
    const own = ({ id, rows, basis }) => (id === "transform" || rows === "basis" ? basis : null);
    const bases = this.layers.flatMap(sidesOf).flatMap(({ codec }) => [own(codec), codec.balanced?.basis]);
    return [...new Set(bases.filter(Boolean).map(hex))];
  }
  tokenIds = () => tokenIds(this.header);
  // Read the stored bytes of a tensor by pieces of at most `size` bytes, and check its pad and digest.
  async #read({ name, offset, pad, stored, digest }, size, visit) {
    const at = this.dataStart + Number(offset);
    must(isZero(await readExactly(this.source, at - pad, at)), "container-19", `the pad before ${name}`);
    const end = at + Number(stored);
    const found = new Digest();
    for (let from = at; from < end; from += size) {
      const bytes = await readExactly(this.source, from, Math.min(from + size, end));
      found.update(bytes);
      visit(bytes);
    }
    checkDigest(name, hex(found.finish()), hex(digest));
  }
  // Returns the bytes of a tensor, decompressed, after its padding and digest are checked.
  async tensor(tensor) {
    limit(tensor.size, this.limit, `bytes of ${tensor.name}`);
    let result = new Uint8Array(0);
    await this.#read(tensor, Infinity, (bytes) => (result = bytes));
    if (tensor.filter === "none") return result;
    return decompress(result, Number(tensor.size), this.header.ignorable.has("zstd-checksum"));
  }
  // Checks a tensor in slices, and calls `progress(bytes)` after each. tensor() decompresses frames.
  async checkTensor(tensor, progress = () => {}) {
    await this.#read(tensor, PIECE, (bytes) => progress(bytes.length));
    if (tensor.filter === "zstd") await this.tensor(tensor);
  }
  // The streams of a side in memory, all their tensors checked: a Map for decode().
  async streams(layer, which) {
    const result = new Map();
    for (const one of this.layers[layer][which].streams) result.set(one.stream, await this.tensor(one));
    return result;
  }
  // The values of a side, binary32 [batch, head, token, channel]: { shape, values }. options: bases (Map from
  // a digest in hexadecimal to a Basis), streams, batch, heads and tokens: [from, to] of each.
  async decode(layer, which, { bases = new Map(), streams, ...options } = {}) {
    const side = this.layers[layer][which];
    const whole = { batch: [0, side.batch], heads: [0, side.heads], tokens: [0, side.length] };
    const range = { ...whole, ...options };
    const counts = [range.batch, range.heads, range.tokens].map(([from, to]) => to - from);
    const shape = [...counts, side.dim];
    limit(byteSize({ dtype: "F32", shape }), this.limit, "bytes of values");
    const bytes = streams ?? (await this.streams(layer, which));
    return { shape, values: decodeSide(side, bytes, bases, range) };
  }
}

export async function openBasis(source, options = {}) {
  const file = await open(source, options);
  need(file.isBasis, "basis-18", "the file is not a basis");
  return loadBasis(file);
}

export async function loadBasis(file) {
  const { source, header } = file;
  const [sides, states] = [new Map(), new Map()];
  for (const { layer, which, streams } of header.layers.flatMap(sidesOf)) {
    const values = finite(await file.tensor(streams[0]), streams[0].dtype, streams[0].name, "basis-4");
    sides.set(`${layer}.${which}`, values);
  }
  for (const state of header.states) states.set(state.name, await file.tensor(state));
  const digest = await sha256(await readExactly(source, 0, source.size));
  return new Basis(header, hex(digest), sides, states);
}
// Check everything that a file has, and call options.values(layer, side, { shape, values }) for each side.
export async function verify(file, { values = () => {}, ...options } = {}) {
  if (file.isBasis) await loadBasis(file);
  for (const state of file.header.states) await file.tensor(state);
  for (const { layer, which } of file.layers.flatMap(sidesOf))
    values(layer, which, await file.decode(layer, which, options));
}
