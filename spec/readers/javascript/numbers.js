// Stored numbers (README.md, Conventions) and typed views of bytes. All of it needs a little-endian machine.
import { must } from "./errors.js";

if (new Uint8Array(Uint16Array.of(1).buffer)[0] !== 1)
  throw new Error("this reader needs a little-endian machine");
export const range = (count, make) => Array.from({ length: count }, (_, i) => make(i));
export const isInteger = (value) => typeof value === "number" || typeof value === "bigint";
export const isZero = (bytes) => bytes.every((byte) => byte === 0);
export const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
export const ascii = (bytes) => Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
export const equalBytes = (a, b) => a.length === b.length && a.every((byte, i) => byte === b[i]);
export const viewOf = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
export const WIDTHS = { U8: 1, U16: 2, F16: 2, BF16: 2, F32: 4 };
// Node 18 has no global of this name.
export const { subtle } = globalThis.crypto ?? (await import("node:crypto")).webcrypto;
export const sha256 = async (bytes) => new Uint8Array(await subtle.digest("SHA-256", bytes));
// binary16 to binary32, for all 65,536 numbers.
export const HALF = new Float32Array(65536);
const halfBits = new Uint32Array(HALF.buffer);
for (let i = 0; i < 65536; i++) {
  const [exponent, fraction] = [(i >> 10) & 31, i & 1023];
  if (exponent === 31) halfBits[i] = 0x7f800000 | (fraction << 13);
  else HALF[i] = exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction;
  halfBits[i] |= (i & 0x8000) << 16;
}
const float = new Float32Array(1);
const word = new Int32Array(float.buffer);
export const floatOfBits = (bits) => new Float32Array(Int32Array.of(bits).buffer)[0];
// A binary32 number rounded to binary16 (ties to even), as a number.
export function roundToHalf(x) {
  float[0] = x;
  // Adding and subtracting 1.5 · 2^52 units rounds a number to a multiple of the unit.
  const large = 1.5 * 2 ** (Math.max((word[0] >> 23) & 255, 113) - 85);
  const result = x + large - large;
  return Math.abs(result) < 65536 ? result || x * 0 : x * Infinity;
}
// Returns a view of `bytes`, or of a copy if `bytes` is not aligned for its type.
export function view(bytes, Type) {
  const width = Type.BYTES_PER_ELEMENT;
  const { buffer, byteOffset } = bytes.byteOffset % width ? bytes.slice() : bytes;
  return new Type(buffer, byteOffset, Math.floor(bytes.length / width));
}
// The numbers of a stream: binary32 of floating-point numbers, and integers as they are.
export function floats(bytes, dtype) {
  if (dtype === "U8") return bytes;
  if (dtype === "F32") return view(bytes, Float32Array);
  const words = view(bytes, Uint16Array);
  if (dtype === "U16") return words;
  const result = new Float32Array(words.length);
  const bits = new Uint32Array(result.buffer);
  if (dtype === "F16") for (let i = 0; i < words.length; i++) result[i] = HALF[words[i]];
  else for (let i = 0; i < words.length; i++) bits[i] = words[i] << 16;
  return result;
}
// Like floats(), for numbers that have to be finite (rule front-13 unless another is named).
export function finite(bytes, dtype, name, rule = "front-13") {
  const result = floats(bytes, dtype);
  const bits = new Uint32Array(result.buffer, result.byteOffset, result.length);
  const at = bits.findIndex((one) => (one & 0x7f800000) === 0x7f800000);
  must(at < 0, rule, `${name} has a number that is not finite at index ${at}`);
  return result;
}

export function littleEndian(bytes, at, width) {
  let result = 0n;
  for (let i = width - 1; i >= 0; i--) result = (result << 8n) | BigInt(bytes[at + i]);
  return result;
}

export function concat(...parts) {
  const result = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) {
    result.set(part, at);
    at += part.length;
  }
  return result;
}
// Bytes that are read from first to last; `cut` is called where there are fewer than are to be read.
export class Cursor {
  constructor(bytes, cut, at = 0, end = bytes.length) {
    Object.assign(this, { bytes, cut, at, end });
  }
  get left() {
    return this.end - this.at;
  }
  take(count) {
    if (count > this.left) this.cut();
    this.at += count;
    return this.bytes.subarray(this.at - count, this.at);
  }
  part(size) {
    this.take(size);
    return new Cursor(this.bytes, this.cut, this.at - size, this.at);
  }
  big = (width) => littleEndian(this.take(width), 0, width);
  number = (width) => Number(this.big(width));
}
