// Stored numbers (README.md, Conventions) and typed views of bytes. All of it needs a little-endian machine.

import { badPayload } from "./errors.js";

if (new Uint8Array(new Uint16Array([1]).buffer)[0] !== 1)
  throw new Error("this reader needs a little-endian machine");

export const viewOf = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
export const isInteger = (value) => typeof value === "number" || typeof value === "bigint";
export const WIDTHS = { U8: 1, U16: 2, F16: 2, BF16: 2, F32: 4 };

const word = new Uint32Array(1);
const float = new Float32Array(word.buffer);

// binary16 to binary32, for all 65,536 numbers.
export const HALF = new Float32Array(65536);
const halfBits = new Uint32Array(HALF.buffer);
for (let i = 0; i < 65536; i++) {
  const exponent = (i >> 10) & 31;
  const fraction = i & 1023;
  if (exponent === 31) halfBits[i] = ((i & 0x8000) << 16) | 0x7f800000 | (fraction << 13);
  else if (exponent) HALF[i] = (i & 0x8000 ? -1 : 1) * 2 ** (exponent - 15) * (1 + fraction / 1024);
  else HALF[i] = (i & 0x8000 ? -1 : 1) * 2 ** -24 * fraction;
}

// A binary32 number rounded to binary16 (ties to even), as a number.
export function roundToHalf(x) {
  const size = Math.abs(x);
  if (!(size < 65520)) return Number.isNaN(x) ? NaN : x > 0 ? Infinity : -Infinity;
  if (size === 0) return x;
  const step = 2 ** (Math.max(Math.floor(Math.log2(size)), -14) - 10);
  // Math.log2 of a number just below a power of two may round up to it; both steps then give the same result,
  // except that the larger one is too coarse, so it is corrected.
  const fine = size < step * 1024 && step > 2 ** -24 ? step / 2 : step;
  const steps = size / fine;
  let whole = Math.floor(steps);
  const rest = steps - whole;
  if (rest > 0.5 || (rest === 0.5 && whole % 2)) whole++;
  return x < 0 ? -whole * fine : whole * fine;
}

export function floatOfBits(bits) {
  word[0] = bits;
  return float[0];
}

// A view that begins where its type allows; a copy where `bytes` does not.
export function view(bytes, Type) {
  const width = Type.BYTES_PER_ELEMENT;
  if (bytes.byteOffset % width) bytes = bytes.slice();
  return new Type(bytes.buffer, bytes.byteOffset, Math.floor(bytes.length / width));
}

// The numbers of a stream: binary32 of floating-point numbers, and integers as they are.
export function floats(bytes, dtype) {
  if (dtype === "U8") return bytes;
  if (dtype === "U16") return view(bytes, Uint16Array);
  if (dtype === "F32") return view(bytes, Float32Array);
  const words = view(bytes, Uint16Array);
  const result = new Float32Array(words.length);
  if (dtype === "F16") for (let i = 0; i < words.length; i++) result[i] = HALF[words[i]];
  else {
    const bits = new Uint32Array(result.buffer);
    for (let i = 0; i < words.length; i++) bits[i] = words[i] << 16;
  }
  return result;
}

// Like floats(), for numbers that have to be finite (rule front-13 unless another is named).
export function finite(bytes, dtype, name, rule = "front-13") {
  const result = floats(bytes, dtype);
  const bits = new Uint32Array(result.buffer, result.byteOffset, result.length);
  for (let i = 0; i < bits.length; i++)
    if ((bits[i] & 0x7f800000) === 0x7f800000)
      badPayload(rule, `${name} has a number that is not finite at index ${i}`);
  return result;
}

export function littleEndian(bytes, at, width) {
  let result = 0n;
  for (let i = width - 1; i >= 0; i--) result = (result << 8n) | BigInt(bytes[at + i]);
  return result;
}

export function equalBytes(a, b) {
  if (a.length !== b.length) return false;
  for (let i = 0; i < a.length; i++) if (a[i] !== b[i]) return false;
  return true;
}

export const isZero = (bytes) => bytes.every((byte) => byte === 0);

export function hex(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
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

// Node 18 has no global of this name.
export const { subtle } = globalThis.crypto ?? (await import("node:crypto")).webcrypto;

export async function sha256(bytes) {
  return new Uint8Array(await subtle.digest("SHA-256", bytes));
}
