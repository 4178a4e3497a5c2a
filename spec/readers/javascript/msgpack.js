// The msgpack profile (container.md), read strictly, and what is new in a header, read leniently.

import { aboveLimit, badHeader } from "./errors.js";

export const MAX_ENTRIES = 131072;
export const MAX_NAMES = 256;
export const MAX_STRING_BYTES = 4096;
export const MAX_BINARY_BYTES = 65536;

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const encoder = new TextEncoder();

export function decodeUtf8(bytes) {
  try {
    return utf8.decode(bytes);
  } catch {
    return null;
  }
}

// The order of two strings by Unicode code points.
export function compareText(a, b) {
  const [x, y] = [encoder.encode(a), encoder.encode(b)];
  const common = Math.min(x.length, y.length);
  for (let i = 0; i < common; i++) if (x[i] !== y[i]) return x[i] - y[i];
  return x.length - y.length;
}

class Parser {
  constructor(bytes) {
    this.bytes = bytes;
    this.data = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    this.at = 0;
  }

  take(count) {
    if (count > this.bytes.length - this.at) badHeader("container-10", "kvpack.header ends within a value");
    this.at += count;
    return this.at - count;
  }

  // An unsigned number of `width` bytes that no shorter form could hold.
  number(width, least) {
    const at = this.take(width);
    const value = width === 8 ? this.data.getBigUint64(at) : Number(`0x${this.digits(at, width)}`);
    if (value < least)
      badHeader("container-10", `a value of kvpack.header is not in its shortest form at byte ${at}`);
    return value <= Number.MAX_SAFE_INTEGER ? Number(value) : value;
  }

  digits(at, width) {
    let text = "";
    for (let i = 0; i < width; i++) text += this.bytes[at + i].toString(16).padStart(2, "0");
    return text;
  }

  value(depth) {
    const code = this.bytes[this.take(1)];
    if (code < 0x80) return code;
    if (code < 0x90) return this.map(code & 15, depth);
    if (code < 0xa0) return this.array(code & 15, depth);
    if (code < 0xc0) return this.string(code & 31);
    switch (code) {
      case 0xc0:
        return null;
      case 0xc4:
        return this.binary(this.number(1, 0));
      case 0xc5:
        return this.binary(this.number(2, 256));
      case 0xc6:
        return this.binary(this.number(4, 65536));
      case 0xcc:
        return this.number(1, 128);
      case 0xcd:
        return this.number(2, 256);
      case 0xce:
        return this.number(4, 65536);
      case 0xcf:
        return this.number(8, 2 ** 32);
      case 0xd9:
        return this.string(this.number(1, 32));
      case 0xda:
        return this.string(this.number(2, 256));
      case 0xdb:
        return this.string(this.number(4, 65536));
      case 0xdc:
        return this.array(this.number(2, 16), depth);
      case 0xdd:
        return this.array(this.number(4, 65536), depth);
      case 0xde:
        return this.map(this.number(2, 16), depth);
      case 0xdf:
        return this.map(this.number(4, 65536), depth);
    }
    return badHeader("container-10", `kvpack.header has a value of the type 0x${code.toString(16)}`);
  }

  string(length) {
    if (length > MAX_STRING_BYTES) aboveLimit(`a string of ${length} bytes, at most ${MAX_STRING_BYTES}`);
    const at = this.take(length);
    const text = decodeUtf8(this.bytes.subarray(at, at + length));
    if (text === null) badHeader("container-10", `a string of kvpack.header is not UTF-8 at byte ${at}`);
    return text;
  }

  binary(length) {
    if (length > MAX_BINARY_BYTES)
      aboveLimit(`a binary value of ${length} bytes, at most ${MAX_BINARY_BYTES}`);
    const at = this.take(length);
    return this.bytes.slice(at, at + length);
  }

  open(depth) {
    if (depth === 5) badHeader("container-10", "kvpack.header nests deeper than five maps and arrays");
  }

  array(count, depth) {
    this.open(depth);
    if (count > MAX_ENTRIES) aboveLimit(`an array of ${count} entries, at most ${MAX_ENTRIES}`);
    const result = [];
    for (let i = 0; i < count; i++) result.push(this.value(depth + 1));
    return result;
  }

  map(count, depth) {
    this.open(depth);
    if (count > MAX_NAMES) aboveLimit(`a map of ${count} keys, at most ${MAX_NAMES}`);
    const result = new Map();
    for (let i = 0; i < count; i++) {
      const key = this.value(5);
      if (typeof key !== "string") badHeader("container-10", "a key of kvpack.header is not a string");
      if (result.has(key))
        badHeader("container-10", `kvpack.header has the key ${JSON.stringify(key)} twice`);
      result.set(key, this.value(depth + 1));
    }
    return result;
  }
}

// The header map: Map, Array, string, Uint8Array, number (BigInt from 2^53 on) and null.
export function parse(bytes) {
  const parser = new Parser(bytes);
  const result = parser.value(0);
  if (!(result instanceof Map)) badHeader("container-10", "kvpack.header is not a map");
  if (parser.at !== bytes.length) badHeader("container-10", "bytes follow the map of kvpack.header");
  return result;
}

class Cut extends Error {}

// Reads msgpack of any form as far as it goes; throws Cut at its end.
class Scanner {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  unsigned(width) {
    if (this.at + width > this.bytes.length) throw new Cut();
    let value = 0;
    for (let i = 0; i < width; i++) value = value * 256 + this.bytes[this.at++];
    return value;
  }

  // The next value: { kind, count, size, value }, after its head; the content of strings is not skipped.
  head() {
    const code = this.unsigned(1);
    if (code < 0x80) return { kind: "integer", value: code };
    if (code < 0x90) return { kind: "map", count: code & 15 };
    if (code < 0xa0) return { kind: "array", count: code & 15 };
    if (code < 0xc0) return { kind: "string", size: code & 31 };
    if (code >= 0xe0) return { kind: "integer", value: code - 256 };
    if (code < 0xc4) return { kind: "other", size: 0 };
    if (code < 0xc7) return { kind: "other", size: this.unsigned(1 << (code - 0xc4)) };
    if (code < 0xca) return { kind: "other", size: this.unsigned(1 << (code - 0xc7)) + 1 };
    if (code < 0xcc) return { kind: "other", size: code === 0xca ? 4 : 8 };
    if (code < 0xd0) return { kind: "integer", value: this.unsigned(1 << (code - 0xcc)) };
    if (code < 0xd4) {
      const width = 1 << (code - 0xd0);
      const value = this.unsigned(width);
      return { kind: "integer", value: value < 2 ** (8 * width - 1) ? value : value - 2 ** (8 * width) };
    }
    if (code < 0xd9) return { kind: "other", size: (1 << (code - 0xd4)) + 1 };
    if (code < 0xdc) return { kind: "string", size: this.unsigned(1 << (code - 0xd9)) };
    return { kind: code < 0xde ? "array" : "map", count: this.unsigned(code & 1 ? 4 : 2) };
  }

  content(size) {
    if (size > this.bytes.length - this.at) throw new Cut();
    this.at += size;
    return this.bytes.subarray(this.at - size, this.at);
  }

  // Skip what a head has announced, without recursion: `open` values are still to come.
  skip(head) {
    for (let open = 1; open; open--) {
      if (head.size) this.content(head.size);
      if (head.count) open += head.count * (head.kind === "map" ? 2 : 1);
      if (open > 1) head = this.head();
    }
  }

  // Call `visit(key, head)` for each pair of a map whose key is a string; false: the value is to be skipped.
  map(count, visit) {
    const seen = new Set();
    for (let i = 0; i < count; i++) {
      const key = this.head();
      let name = null;
      if (key.kind === "string") name = String.fromCharCode(...this.content(key.size).subarray(0, 100));
      else this.skip(key);
      const head = this.head();
      if (name === null || seen.has(name) || !visit(name, head)) this.skip(head);
      seen.add(name);
    }
  }
}

// What names something new: { format, required, codecs }, the last two lists of names as bytes read as
// Latin-1.
export function scan(bytes) {
  const found = { format: null, required: [], codecs: [] };
  const scanner = new Scanner(bytes);
  const text = (size) => decodeUtf8(scanner.content(size)) ?? "a name that is not UTF-8";
  const required = (head) => {
    for (let i = 0; i < head.count; i++) {
      const entry = scanner.head();
      if (entry.kind === "string") found.required.push(text(entry.size));
      else scanner.skip(entry);
    }
  };
  const codecs = (head) => {
    for (let i = 0; i < head.count; i++) {
      const entry = scanner.head();
      if (entry.kind !== "map") {
        scanner.skip(entry);
        continue;
      }
      let id = null;
      scanner.map(entry.count, (name, value) => {
        if (name !== "id" || value.kind !== "string") return false;
        id = text(value.size);
        return true;
      });
      if (id !== null) found.codecs.push(id);
    }
  };
  try {
    const top = scanner.head();
    if (top.kind !== "map") return found;
    scanner.map(top.count, (name, head) => {
      if (name === "format" && head.kind === "integer") found.format = head.value;
      else if (name === "required" && head.kind === "array") required(head);
      else if (name === "codecs" && head.kind === "array") codecs(head);
      else return false;
      return true;
    });
  } catch (error) {
    if (!(error instanceof Cut)) throw error;
  }
  return found;
}
