// The msgpack profile (container.md), read strictly, and what is new in a header, read leniently.

import { aboveLimit, badHeader } from "./errors.js";
import { viewOf } from "./numbers.js";

export const MAX_ENTRIES = 131072;
export const MAX_NAMES = 256;
export const MAX_STRING_BYTES = 4096;
export const MAX_BINARY_BYTES = 65536;

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const encoder = new TextEncoder();
const malformed = (what) => badHeader("container-10", what);

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

// Bytes of msgpack; `cut` is called where they end within a value.
class Reader {
  constructor(bytes, cut) {
    Object.assign(this, { bytes, cut, at: 0 });
  }

  content(size) {
    if (size > this.bytes.length - this.at) this.cut();
    this.at += size;
    return this.bytes.subarray(this.at - size, this.at);
  }

  // A number, as BigInt from 2^53 on.
  unsigned(width) {
    const bytes = this.content(width);
    let value = 0;
    for (const byte of bytes) value = value * 256 + byte;
    return Number.isSafeInteger(value) ? value : viewOf(bytes).getBigUint64(0);
  }

  // The next value up to its content: { kind, number, least }. `number` is an integer, or the count or size
  // of other kinds; below `least` it has a shorter form.
  head() {
    const code = this.unsigned(1);
    if (code < 0x80) return { kind: "integer", number: code };
    if (code < 0x90) return { kind: "map", number: code & 15 };
    if (code < 0xa0) return { kind: "array", number: code & 15 };
    if (code < 0xc0) return { kind: "string", number: code & 31 };
    if (code === 0xc0) return { kind: "nil", number: 0 };
    if (code < 0xc4) return { kind: "boolean", number: 0 };
    if (code >= 0xe0) return { kind: "negative", number: code - 256 };
    const first = [0xdc, 0xd9, 0xd4, 0xd0, 0xcc, 0xca, 0xc7, 0xc4].find((start) => code >= start);
    const width = 1 << (code - first);
    const sized = (kind, least) => {
      const number = this.unsigned(width);
      return { kind, number, least: width === 1 ? least : 2 ** (4 * width) };
    };
    switch (first) {
      case 0xc4:
        return sized("binary", 0);
      case 0xc7:
        return { kind: "extension", number: this.unsigned(width) + 1 };
      case 0xca:
        return { kind: "float", number: 4 * width };
      case 0xcc:
        return sized("integer", 128);
      case 0xd0:
        return { kind: "signed", number: BigInt.asIntN(8 * width, BigInt(this.unsigned(width))) };
      case 0xd4:
        return { kind: "extension", number: width + 1 };
      case 0xd9:
        return sized("string", 32);
    }
    const wide = code & 1;
    return {
      kind: code < 0xde ? "array" : "map",
      number: this.unsigned(wide ? 4 : 2),
      least: wide ? 65536 : 16,
    };
  }
}

class Parser extends Reader {
  constructor(bytes) {
    super(bytes, () => malformed("kvpack.header ends within a value"));
  }

  value(depth) {
    const { at } = this;
    const { kind, number, least = 0 } = this.head();
    if (number < least) malformed(`a value of kvpack.header is not in its shortest form at byte ${at}`);
    switch (kind) {
      case "integer":
        return number;
      case "nil":
        return null;
      case "string":
        return this.string(number);
      case "binary":
        if (number > MAX_BINARY_BYTES)
          aboveLimit(`a binary value of ${number} bytes, at most ${MAX_BINARY_BYTES}`);
        return this.content(number).slice();
      case "array":
      case "map":
        if (depth === 5) malformed("kvpack.header nests deeper than five maps and arrays");
        return this[kind](number, depth + 1);
    }
    return malformed(`kvpack.header has a value of the type ${kind} at byte ${at}`);
  }

  string(length) {
    if (length > MAX_STRING_BYTES) aboveLimit(`a string of ${length} bytes, at most ${MAX_STRING_BYTES}`);
    return decodeUtf8(this.content(length)) ?? malformed(`a string is not UTF-8 before byte ${this.at}`);
  }

  array(count, depth) {
    if (count > MAX_ENTRIES) aboveLimit(`an array of ${count} entries, at most ${MAX_ENTRIES}`);
    const result = [];
    for (let i = 0; i < count; i++) result.push(this.value(depth));
    return result;
  }

  map(count, depth) {
    if (count > MAX_NAMES) aboveLimit(`a map of ${count} keys, at most ${MAX_NAMES}`);
    const result = new Map();
    for (let i = 0; i < count; i++) {
      const key = this.value(5);
      if (typeof key !== "string") malformed("a key of kvpack.header is not a string");
      if (result.has(key)) malformed(`kvpack.header has the key ${JSON.stringify(key)} twice`);
      result.set(key, this.value(depth));
    }
    return result;
  }
}

// The header map: Map, Array, string, Uint8Array, number (BigInt from 2^53 on) and null.
export function parse(bytes) {
  const parser = new Parser(bytes);
  const result = parser.value(0);
  if (!(result instanceof Map)) malformed("kvpack.header is not a map");
  if (parser.at !== bytes.length) malformed("bytes follow the map of kvpack.header");
  return result;
}

class Cut extends Error {}

// Reads msgpack of any form as far as it goes; throws Cut at its end.
class Scanner extends Reader {
  constructor(bytes) {
    super(bytes, () => {
      throw new Cut();
    });
  }

  text(size) {
    return decodeUtf8(this.content(size)) ?? "a name that is not UTF-8";
  }

  // Skip what a head has announced, without recursion: `open` values are still to come.
  skip(head) {
    for (let open = 1; open; open--) {
      const { kind, number } = head;
      if (["string", "binary", "extension", "float"].includes(kind)) this.content(number);
      if (kind === "array" || kind === "map") open += number * (kind === "map" ? 2 : 1);
      if (open > 1) head = this.head();
    }
  }

  // Call `visit(head)` for each entry of an array; those not of `kind` are skipped.
  array(count, kind, visit) {
    for (let i = 0; i < count; i++) {
      const head = this.head();
      if (head.kind === kind) visit(head);
      else this.skip(head);
    }
  }

  // Call `visit(key, head)` for each pair of a map whose key is a string; false: the value is to be skipped.
  map(count, visit) {
    const seen = new Set();
    for (let i = 0; i < count; i++) {
      const key = this.head();
      let name = null;
      if (key.kind === "string") name = String.fromCharCode(...this.content(key.number).subarray(0, 100));
      else this.skip(key);
      const head = this.head();
      if (name === null || seen.has(name) || !visit(name, head)) this.skip(head);
      seen.add(name);
    }
  }
}

// What names something new, as far as the bytes go: { format, required, codecs }.
export function scan(bytes) {
  const found = { format: null, required: [], codecs: [] };
  const scanner = new Scanner(bytes);
  const codec = (entry) => {
    let id = null;
    scanner.map(entry.number, (name, head) => {
      if (name !== "id" || head.kind !== "string") return false;
      id = scanner.text(head.number);
      return true;
    });
    if (id !== null) found.codecs.push(id);
  };
  const field = (name, { kind, number }) => {
    if (name === "format" && ["integer", "signed", "negative"].includes(kind)) found.format = number;
    else if (name === "required" && kind === "array")
      scanner.array(number, "string", (entry) => found.required.push(scanner.text(entry.number)));
    else if (name === "codecs" && kind === "array") scanner.array(number, "map", codec);
    else return false;
    return true;
  };
  try {
    const top = scanner.head();
    if (top.kind === "map") scanner.map(top.number, field);
  } catch (error) {
    if (!(error instanceof Cut)) throw error;
  }
  return found;
}
