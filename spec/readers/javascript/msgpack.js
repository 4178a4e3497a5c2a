// The msgpack profile (container.md). One walk reads msgpack of any form as far as it goes, because what is
// new in a header comes before all else, and notes the first thing that the profile does not have.
import { badHeader, limit, quoted } from "./errors.js";
import { Cursor, viewOf } from "./numbers.js";

export const MAX_NAMES = 256;
export const MAX_STRING_BYTES = 4096;
const [MAX_ENTRIES, MAX_BINARY_BYTES, MAX_DEPTH] = [131072, 65536, 5];
const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
const encoder = new TextEncoder();
const malformed = (what) => badHeader("container-10", `kvpack.header ${what}`);

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
// By the first byte of a value: its kind, and its number, size or count, or the bytes that hold it.
const FIRST = [];
const forms =
  "integer*128 map*16 array*16 string*32 nil0 other0 other0 other0 binary-1 binary-2 binary-4 other-1 " +
  "other-2 other-4 other4 other8 integer-1 integer-2 integer-4 integer-8 signed-1 signed-2 signed-4 " +
  "signed-8 other2 other3 other5 other9 other17 string-1 string-2 string-4 array-2 array-4 map-2 map-4";
for (const form of (forms + " other0".repeat(32)).split(" ")) {
  const [, kind, sign, size] = /([a-z]+)([-*]?)([0-9]+)/.exec(form);
  if (sign === "*") for (let number = 0; number < size; number++) FIRST.push({ kind, number });
  else FIRST.push(sign ? { kind, width: Number(size) } : { kind, number: Number(size) });
}
// The smallest number of each kind for each number of bytes. Smaller numbers have a shorter form.
const COUNTS = { 2: 16, 4: 65536 };
const BYTES = { 2: 256, 4: 65536 };
const INTEGERS = { 1: 128, 2: 256, 4: 65536, 8: 2 ** 32 };
const LEAST = { integer: INTEGERS, binary: BYTES, string: { 1: 32, ...BYTES }, array: COUNTS, map: COUNTS };

class Cut extends Error {}

class Parser extends Cursor {
  fault = null;
  constructor(bytes) {
    super(bytes, () => {
      throw new Cut();
    });
  }
  note = (refuse) => (this.fault ??= refuse);
  limit(value, most, what) {
    if (value > most) this.note(() => limit(value, most, what));
  }
  // The beginning of a value: { kind, number, width }. Numbers are BigInt from 2^53 on.
  head() {
    const first = FIRST[this.take(1)[0]];
    const { kind, width } = first;
    if (!width) return first;
    const bytes = this.take(width);
    let number = 0;
    for (const byte of bytes) number = number * 256 + byte;
    if (!Number.isSafeInteger(number)) number = viewOf(bytes).getBigUint64(0);
    return { kind, number: kind === "other" ? number + 1 : number, width };
  }
  // A value; `attach` takes a map or array before its content, which may be cut short.
  value(depth, attach) {
    const { at } = this;
    const { kind, number, width } = this.head();
    if (number < LEAST[kind]?.[width])
      this.note(() => malformed(`has a longer form than it needs at byte ${at}`));
    if (kind === "integer") return number;
    if (kind === "nil") return null;
    if (kind === "string") return this.string(number);
    if (kind === "binary") {
      this.limit(number, MAX_BINARY_BYTES, "bytes of a binary value");
      return this.take(number).slice();
    }
    if ((kind === "array" || kind === "map") && depth < MAX_DEPTH)
      return this[kind](number, depth + 1, attach);
    this.note(() => malformed(`has a value of another type, or too deep a one, at byte ${at}`));
    if (kind === "signed") return BigInt.asIntN(8 * width, BigInt(number));
    this.skip({ kind, number });
    return undefined;
  }
  // Skips the contents of a value, which follow its head, without recursion.
  skip(head) {
    for (let open = 1; open; open--) {
      const { kind, number } = head;
      if (kind === "array" || kind === "map") open += number * (kind === "map" ? 2 : 1);
      else if (kind === "string" || kind === "binary" || kind === "other") this.take(number);
      if (open > 1) head = this.head();
    }
  }
  string(size) {
    this.limit(size, MAX_STRING_BYTES, "bytes of a string");
    const text = decodeUtf8(this.take(size));
    if (text === null) this.note(() => malformed(`has a string that is not UTF-8`));
    return text ?? "(not UTF-8)";
  }
  array(count, depth, attach) {
    this.limit(count, MAX_ENTRIES, "elements of an array");
    const result = [];
    attach?.(result);
    for (let i = 0; i < count; i++) result.push(this.value(depth));
    return result;
  }
  map(count, depth, attach) {
    this.limit(count, MAX_NAMES, "members of a map");
    const result = new Map();
    attach?.(result);
    for (let i = 0; i < count; i++) {
      const key = this.value(MAX_DEPTH);
      if (typeof key !== "string") this.note(() => malformed("has a map key that is not a string"));
      const isNew = typeof key === "string" && !result.has(key);
      if (!isNew) this.note(() => malformed(`has the map key ${quoted(key)} twice`));
      const set = isNew ? (value) => result.set(key, value) : () => {};
      set(this.value(depth, set));
    }
    return result;
  }
}
// The map of a header as far as it goes, and a function that refuses its first fault, if it has one.
export function parse(bytes) {
  const parser = new Parser(bytes);
  let root = null;
  try {
    root = parser.value(0, (value) => (root = value));
    if (!(root instanceof Map)) parser.note(() => malformed("is not a map"));
    if (parser.left) parser.note(() => malformed("has bytes after its map"));
  } catch (error) {
    if (!(error instanceof Cut)) throw error;
    parser.note(() => malformed("ends within a value"));
  }
  return { map: root instanceof Map ? root : new Map(), fault: parser.fault };
}
