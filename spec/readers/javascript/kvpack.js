// A reader of kvpack 1 of the profile full, for browsers and Node, written from the pages of spec/.
// A source is anything with `size` and an asynchronous `read(from, to)` that returns a Uint8Array.

import { Basis } from "./basis.js";
import { decodeSide } from "./decode.js";
import {
  KvpackError,
  aboveLimit,
  badHeader,
  badPayload,
  digestMismatch,
  notKvpack,
  truncated,
  unsupported,
} from "./errors.js";
import { checkBasisHeader, readHeader, refuseNew, sidesOf, tokenIds } from "./header.js";
import { concat, equalBytes, finite, hex, isZero, sha256, viewOf } from "./numbers.js";
import { CODECS } from "./parameters.js";
import { Digest, xxh3 } from "./xxhash.js";
import { decompress } from "./zstd.js";

export { KvpackError };

const START = '{"__metadata__":{"format":"kvpack","kvpack":"';
const MAX_JSON_BYTES = 16777216;
const MAX_HEADER_BYTES = 8388608;
const MAX_FILE_BYTES = 2n ** 60n - 1n;
const PIECE = 8388608;
const latin = (bytes) => Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
const knownCodec = (id) => id !== "opaque" && Object.hasOwn(CODECS, id);

export function fromBytes(bytes) {
  return { size: bytes.length, read: async (from, to) => bytes.slice(from, to) };
}

export function fromBlob(blob) {
  return {
    size: blob.size,
    read: async (from, to) => new Uint8Array(await blob.slice(from, to).arrayBuffer()),
  };
}

// An open file handle of Node.
export async function fromHandle(handle) {
  const read = async (from, to) => {
    const bytes = new Uint8Array(to - from);
    for (let at = 0; at < bytes.length;) {
      const { bytesRead } = await handle.read(bytes, at, bytes.length - at, from + at);
      if (!bytesRead) return bytes.slice(0, at);
      at += bytesRead;
    }
    return bytes;
  };
  return { size: (await handle.stat()).size, read };
}

// A file behind a URL whose server knows ranges.
export async function fromUrl(url) {
  const response = await fetch(url, { method: "HEAD", cache: "no-store" });
  if (!response.ok) throw new Error(`${url}: ${response.status}`);
  const read = async (from, to) => {
    if (from === to) return new Uint8Array(0);
    const part = await fetch(url, { headers: { Range: `bytes=${from}-${to - 1}` }, cache: "no-store" });
    if (part.status !== 206) throw new Error(`${url}: ${part.status}`);
    return new Uint8Array(await part.arrayBuffer());
  };
  return { size: Number(response.headers.get("Content-Length")), read };
}

async function readExactly(source, from, to, rule) {
  if (to > source.size) truncated(rule, `the file has ${source.size} bytes, and ${to} are needed`);
  const bytes = await source.read(from, to);
  if (bytes.length !== to - from) truncated(rule, `the file ended at byte ${from + bytes.length}`);
  return bytes;
}

// The major number at the beginning of a JSON header.
function checkMajor(text, size) {
  if (!text.startsWith(START)) notKvpack("container-5", "the bytes from 8 on are not those of a kvpack file");
  const [, major, next] = /^([1-9][0-9]{0,8})?(.?)/s.exec(text.slice(START.length));
  if (next === "" && size < 8 + START.length + 10)
    truncated("container-4", "the file ends within its major number");
  if (!major || (next !== " " && next !== '"')) badHeader("container-5", "the major number is not a number");
  if (major !== "1")
    unsupported("container-6", `the file is of version ${major}; this reader knows version 1`);
}

// The place of kvpack.header, from the beginning of the JSON header.
function headerPlace(text) {
  const match = /^1 ([0-9a-f]{32})"\},"kvpack\.header":\{"dtype":"U8","shape":\[(0|[1-9][0-9]*)\]/.exec(
    text.slice(START.length),
  );
  if (!match || match[2].length > 7)
    badHeader("container-5", "the JSON header does not begin as its form says");
  const size = Number(match[2]);
  if (size > MAX_HEADER_BYTES) aboveLimit(`kvpack.header has ${size} bytes, at most ${MAX_HEADER_BYTES}`);
  if (!text.slice(START.length + match[0].length).startsWith(`,"data_offsets":[0,${size}]}`))
    badHeader("container-5", "the JSON header does not begin as its form says");
  return { digest: match[1], size };
}

// Places of tensors in the data section, from which `offset` counts, as BigInt; returns where they end.
function placeTensors(header, headerBytes) {
  let end = BigInt(headerBytes);
  for (const tensor of header.tensors) {
    tensor.offset = (end + 63n) & ~63n;
    tensor.pad = Number(tensor.offset - end);
    end = tensor.offset + tensor.stored;
  }
  return end;
}

function jsonHeader(header, digest, headerBytes) {
  const entry = (name, dtype, shape, from, to) =>
    `"${name}":{"dtype":"${dtype}","shape":[${shape}],"data_offsets":[${from},${to}]}`;
  const parts = [`${START}1 ${digest}"}`, entry("kvpack.header", "U8", headerBytes, 0, headerBytes)];
  let pads = 0;
  for (const { name, dtype, shape, filter, stored, offset, pad } of header.tensors) {
    if (pad) parts.push(entry(`kvpack.pad.${pads++}`, "U8", pad, offset - BigInt(pad), offset));
    const [type, sizes] = filter === "zstd" ? ["U8", stored] : [dtype, shape];
    parts.push(entry(name, type, sizes, offset, offset + stored));
  }
  const text = `${parts.join()}}`;
  return text + " ".repeat((4096 - ((8 + text.length) % 4096)) % 4096);
}

// Open a file: all checks of container.md (Reading) up to the sizes of the tensors.
// options.limit: bytes of decoded values at once, 4 GiB unless given.
export async function open(source, options = {}) {
  const head = await source.read(0, Math.min(source.size, 8192));
  const text = latin(head.subarray(8));
  checkMajor(text, source.size);
  const length = viewOf(head).getBigUint64(0, true);
  if (length > MAX_JSON_BYTES) aboveLimit(`the JSON header has ${length} bytes, at most ${MAX_JSON_BYTES}`);
  const dataStart = 8 + Number(length);
  if (dataStart > source.size)
    truncated("container-4", `the file of ${source.size} bytes ends before its JSON header`);
  if (dataStart % 4096)
    badHeader("container-3", `the JSON header ends at byte ${dataStart}, not at a multiple of 4096`);
  const { digest, size } = headerPlace(text);
  const bytes = await readExactly(source, dataStart, dataStart + size, "container-4");
  if (hex(xxh3(bytes)) !== digest)
    digestMismatch("container-20", "kvpack.header does not have its digest: the file is damaged");
  refuseNew(bytes, knownCodec);
  const header = readHeader(bytes, knownCodec);
  const end = BigInt(dataStart) + placeTensors(header, size);
  const json = await readExactly(source, 8, dataStart, "container-4");
  if (!equalBytes(json, new TextEncoder().encode(jsonHeader(header, digest, size))))
    badHeader("container-5", "the JSON header is not the one of kvpack.header");
  if (end > MAX_FILE_BYTES) aboveLimit(`the file has ${end} bytes`);
  if (BigInt(source.size) !== end)
    truncated("container-4", `the file has ${source.size} bytes, and its tensors end at ${end}`);
  if (header.required.includes("basis")) checkBasisHeader(header);
  return new KvpackFile(source, header, dataStart, options);
}

function checkDigest({ name, digest }, found) {
  if (!equalBytes(found, digest))
    digestMismatch("container-20", `${name} does not have its digest: the file is damaged`);
}

export class KvpackFile {
  constructor(source, header, dataStart, { limit = 2 ** 32 } = {}) {
    Object.assign(this, { source, header, dataStart, limit });
    this.isBasis = header.required.includes("basis");
    this.checked = header.ignorable.has("zstd-checksum");
  }

  get layers() {
    return this.header.layers;
  }

  // The digests of the bases that the file's sides need.
  get basisDigests() {
    const digests = this.layers
      .flatMap(sidesOf)
      .flatMap(({ codec }) => [
        codec.id === "transform" || (codec.id === "klt" && codec.rows === "basis") ? [hex(codec.basis)] : [],
        codec.balanced ? [hex(codec.balanced.basis)] : [],
      ]);
    return [...new Set(digests.flat())];
  }

  tokenIds() {
    return tokenIds(this.header);
  }

  #place(tensor) {
    return this.dataStart + Number(tensor.offset);
  }

  async #checkPad(tensor) {
    const at = this.#place(tensor);
    const pad = await readExactly(this.source, at - tensor.pad, at, "container-4");
    if (!isZero(pad)) badPayload("container-19", `the pad before ${tensor.name} is not zero`);
  }

  // The bytes of a tensor, its pad and digest checked, and its filter undone.
  async tensor(tensor) {
    if (tensor.size > this.limit)
      aboveLimit(`${tensor.name} takes ${tensor.size} bytes, above the limit of ${this.limit}`);
    await this.#checkPad(tensor);
    const at = this.#place(tensor);
    const bytes = await readExactly(this.source, at, at + Number(tensor.stored), "container-4");
    checkDigest(tensor, xxh3(bytes));
    return tensor.filter === "zstd" ? decompress(bytes, Number(tensor.size), this.checked) : bytes;
  }

  // Check the pad and the digest of a tensor by slices; `progress(bytes)` after each. Frames are undone by
  // tensor().
  async checkTensor(tensor, progress = () => {}) {
    await this.#checkPad(tensor);
    const at = this.#place(tensor);
    const end = at + Number(tensor.stored);
    const digest = new Digest();
    for (let from = at; from < end; from += PIECE) {
      const to = Math.min(from + PIECE, end);
      digest.update(await readExactly(this.source, from, to, "container-4"));
      progress(to - from);
    }
    checkDigest(tensor, digest.finish());
    if (tensor.filter === "zstd") await this.tensor(tensor);
  }

  state(name) {
    return this.tensor(this.header.states.find((state) => state.name === name));
  }

  // The streams of a side in memory, all their tensors checked: a Map for decode().
  async streams(layer, which) {
    const result = new Map();
    for (const stream of this.layers[layer][which].streams)
      result.set(stream.stream, await this.tensor(stream));
    return result;
  }

  // The values of a side, binary32 [batch, head, token, channel]: { shape, values }. options: bases (Map from
  // a digest in hexadecimal to a Basis), streams, batch, heads and tokens: [from, to] of each.
  async decode(layer, which, options = {}) {
    const side = this.layers[layer][which];
    const range = {
      batch: options.batch ?? [0, side.batch],
      heads: options.heads ?? [0, side.heads],
      tokens: options.tokens ?? [0, side.length],
    };
    const shape = [...Object.values(range).map(([from, to]) => to - from), side.dim];
    const size = shape.reduce((product, count) => product * BigInt(count), 4n);
    if (size > this.limit) aboveLimit(`${size} bytes of values are above the limit of ${this.limit}`);
    const bytes = options.streams ?? (await this.streams(layer, which));
    return { shape, values: decodeSide(side, bytes, options.bases ?? new Map(), range) };
  }
}

// Open a basis: the whole file is read and checked.
export async function openBasis(source, options = {}) {
  const file = await open(source, options);
  if (!file.isBasis) badHeader("basis-18", "the file is not a basis");
  return loadBasis(file);
}

export async function loadBasis(file) {
  const { source, header } = file;
  const sides = new Map();
  for (const { layer, which, streams } of header.layers.flatMap(sidesOf)) {
    const values = finite(await file.tensor(streams[0]), streams[0].dtype, streams[0].stream, "basis-4");
    sides.set(`${layer}.${which}`, values);
  }
  const states = new Map();
  for (const state of header.states) states.set(state.name, await file.tensor(state));
  const parts = [];
  for (let at = 0; at < source.size; at += PIECE)
    parts.push(await source.read(at, Math.min(at + PIECE, source.size)));
  return new Basis(header, hex(await sha256(concat(...parts))), sides, states);
}

// Check everything that a file has: every tensor, and what the codecs say of their bytes.
// options.values(layer, side, { shape, values }) is called with the values of each side.
export async function verify(file, options = {}) {
  if (file.isBasis) await loadBasis(file);
  for (const state of file.header.states) await file.tensor(state);
  for (const { layer, which } of file.layers.flatMap(sidesOf))
    await file.decode(layer, which, options).then((decoded) => options.values?.(layer, which, decoded));
}
