// XXH3-128 (container.md, Digests) and XXH64 (the checksum of zstd frames), both with seed 0. Long inputs are
// hashed in 32-bit halves; BigInt is for inputs of at most 240 bytes and for what is done once.

import { view, viewOf } from "./numbers.js";

const SECRET_HEX =
  "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221" +
  "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8" +
  "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb" +
  "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e";
const SECRET = Uint8Array.from(SECRET_HEX.match(/../g), (pair) => parseInt(pair, 16));
const M = 0xffffffffffffffffn;
const P32 = [0n, 0x9e3779b1n, 0x85ebca77n, 0xc2b2ae3dn];
const P64 = [
  0n,
  0x9e3779b185ebca87n,
  0xc2b2ae3d27d4eb4fn,
  0x165667b19e3779f9n,
  0x85ebca77c2b2ae63n,
  0x27d4eb2f165667c5n,
];

const secret = viewOf(SECRET);
const key = (at) => secret.getBigUint64(at, true);

function avalanche(h) {
  h = ((h ^ (h >> 37n)) * 0x165667919e3779f9n) & M;
  return h ^ (h >> 32n);
}

function avalanche64(h) {
  h = ((h ^ (h >> 33n)) * P64[2]) & M;
  h = ((h ^ (h >> 29n)) * P64[3]) & M;
  return h ^ (h >> 32n);
}

function fold(a, b) {
  const product = a * b;
  return (product & M) ^ (product >> 64n);
}

function swap(x, bytes) {
  let result = 0n;
  for (let i = 0; i < bytes; i++) result = (result << 8n) | ((x >> BigInt(8 * i)) & 255n);
  return result;
}

function shortHash(bytes) {
  const data = viewOf(bytes);
  const length = bytes.length;
  const n = BigInt(length);
  const u64 = (at) => data.getBigUint64(at, true);
  if (length > 16) return middleHash(length, u64);
  if (length > 8) {
    let high = u64(length - 8);
    let product = (u64(0) ^ high ^ key(32) ^ key(40)) * P64[1];
    let low = ((product & M) + ((n - 1n) << 54n)) & M;
    high ^= key(48) ^ key(56);
    const upper = ((product >> 64n) + high + (high & 0xffffffffn) * (P32[2] - 1n)) & M;
    low ^= swap(upper, 8);
    product = low * P64[2];
    return [avalanche(((product >> 64n) + upper * P64[2]) & M), avalanche(product & M)];
  }
  if (length > 3) {
    const input = BigInt(data.getUint32(0, true)) | (BigInt(data.getUint32(length - 4, true)) << 32n);
    const product = (input ^ key(16) ^ key(24)) * ((P64[1] + (n << 2n)) & M);
    let low = product & M;
    const high = ((product >> 64n) + (low << 1n)) & M;
    low ^= high >> 3n;
    low = ((low ^ (low >> 35n)) * 0x9fb21c651e98df25n) & M;
    return [avalanche(high), low ^ (low >> 28n)];
  }
  if (length) {
    const [first, middle, last] = [bytes[0], bytes[length >> 1], bytes[length - 1]].map(BigInt);
    const low = (first << 16n) | (middle << 24n) | last | (n << 8n);
    const swapped = swap(low, 4);
    const high = ((swapped << 13n) | (swapped >> 19n)) & 0xffffffffn;
    const u32 = (at) => BigInt(secret.getUint32(at, true));
    return [avalanche64(high ^ u32(8) ^ u32(12)), avalanche64(low ^ u32(0) ^ u32(4))];
  }
  return [avalanche64(key(80) ^ key(88)), avalanche64(key(64) ^ key(72))];
}

function middleHash(length, u64) {
  let low = (BigInt(length) * P64[1]) & M;
  let high = 0n;
  const mix16 = (at, with_) => fold(u64(at) ^ key(with_), u64(at + 8) ^ key(with_ + 8));
  const mix = (a, b, with_) => {
    low = ((low + mix16(a, with_)) & M) ^ ((u64(b) + u64(b + 8)) & M);
    high = ((high + mix16(b, with_ + 16)) & M) ^ ((u64(a) + u64(a + 8)) & M);
  };
  if (length <= 128) {
    for (let i = (length - 1) >> 5; i >= 0; i--) mix(16 * i, length - 16 - 16 * i, 32 * i);
  } else {
    for (let i = 0; i < 128; i += 32) mix(i, i + 16, i);
    [low, high] = [avalanche(low), avalanche(high)];
    for (let i = 160; i <= length; i += 32) mix(i - 32, i - 16, i - 157);
    mix(length - 16, length - 32, 103);
  }
  const upper = (low * P64[1] + high * P64[4] + BigInt(length) * P64[2]) & M;
  return [-avalanche(upper) & M, avalanche((low + high) & M)];
}

// The 64-bit accumulators of long inputs, low and high halves alternating, and the words of the secret in
// halves.
const INITIAL = [P32[3], P64[1], P64[2], P64[3], P64[4], P32[2], P64[5], P32[1]];
const KEYS = new Int32Array(SECRET.buffer);
const LAST_KEYS = new Int32Array(SECRET.slice(121, 185).buffer);
const BLOCK = 1024;

// One stripe of 64 bytes, from word `at` of `words` on, by the secret from word `from` of `keys` on.
function accumulate(acc, words, at, keys, from) {
  for (let i = 0; i < 16; i += 2) {
    const low = words[at + i];
    const high = words[at + i + 1];
    const x = low ^ keys[from + i];
    const y = high ^ keys[from + i + 1];
    // x * y in 64 bits: the upper half by 16-bit parts.
    const [a, b, c, d] = [x & 0xffff, x >>> 16, y & 0xffff, y >>> 16];
    const t = b * c + ((a * c) >>> 16);
    const u = a * d + (t & 0xffff);
    const upper = (b * d + Math.floor(t / 65536) + Math.floor(u / 65536)) | 0;
    let sum = (acc[i] >>> 0) + (Math.imul(x, y) >>> 0);
    acc[i] = sum | 0;
    acc[i + 1] = (acc[i + 1] + upper + (sum > 0xffffffff ? 1 : 0)) | 0;
    const j = i ^ 2;
    sum = (acc[j] >>> 0) + (low >>> 0);
    acc[j] = sum | 0;
    acc[j + 1] = (acc[j + 1] + high + (sum > 0xffffffff ? 1 : 0)) | 0;
  }
}

function scramble(acc) {
  for (let i = 0; i < 16; i += 2) {
    const low = acc[i] ^ (acc[i + 1] >>> 15) ^ KEYS[32 + i];
    const high = acc[i + 1] ^ KEYS[33 + i];
    const product = (low >>> 0) * 0x9e37;
    const rest = (low >>> 0) * 0x79b1;
    // low * 0x9e3779b1 as product * 65536 + rest, both exact in binary64.
    const upper = Math.floor((product + Math.floor(rest / 65536)) / 65536);
    acc[i] = Math.imul(low, 0x9e3779b1);
    acc[i + 1] = (Math.imul(high, 0x9e3779b1) + upper) | 0;
  }
}

function merge(halves, from, start) {
  let result = start;
  for (let i = 0; i < 4; i++)
    result += fold(halves[2 * i] ^ key(from + 16 * i), halves[2 * i + 1] ^ key(from + 16 * i + 8));
  return avalanche(result & M);
}

// The XXH3-128 of bytes that come in pieces.
export class Digest {
  #acc = new Int32Array(16);
  // What is not hashed yet, after the last 64 bytes that are: the last stripe may begin in them.
  #held = new Uint8Array(64 + BLOCK);
  #heldWords = new Int32Array(this.#held.buffer);
  #count = 0;
  #length = 0;

  constructor() {
    INITIAL.forEach((value, i) => {
      this.#acc[2 * i] = Number(value & 0xffffffffn);
      this.#acc[2 * i + 1] = Number(value >> 32n);
    });
  }

  update(bytes) {
    this.#length += bytes.length;
    let at = 0;
    while (at < bytes.length) {
      // A whole block is hashed only once a byte follows it.
      if (this.#count === BLOCK) this.#block(this.#heldWords, 16, this.#held, BLOCK);
      if (this.#count === 0 && bytes.length - at > BLOCK) {
        const whole = Math.floor((bytes.length - at - 1) / BLOCK) * BLOCK;
        const part = bytes.subarray(at, at + whole);
        const aligned = part.byteOffset % 4 ? part.slice() : part;
        const words = new Int32Array(aligned.buffer, aligned.byteOffset, whole / 4);
        for (let block = 0; block < words.length; block += BLOCK / 4) {
          for (let i = 0; i < 16; i++) accumulate(this.#acc, words, block + 16 * i, KEYS, 2 * i);
          scramble(this.#acc);
        }
        this.#held.set(part.subarray(whole - 64));
        at += whole;
      } else {
        const taken = Math.min(BLOCK - this.#count, bytes.length - at);
        this.#held.set(bytes.subarray(at, at + taken), 64 + this.#count);
        this.#count += taken;
        at += taken;
      }
    }
    return this;
  }

  #block(words, at, held, end) {
    for (let i = 0; i < 16; i++) accumulate(this.#acc, words, at + 16 * i, KEYS, 2 * i);
    scramble(this.#acc);
    held.copyWithin(0, end, end + 64);
    this.#count = 0;
  }

  // The digest in canonical form: 16 bytes, most significant first.
  finish() {
    const [high, low] =
      this.#length <= 240 ? shortHash(this.#held.subarray(64, 64 + this.#length)) : this.#long();
    const result = new Uint8Array(16);
    viewOf(result).setBigUint64(0, high);
    viewOf(result).setBigUint64(8, low);
    return result;
  }

  #long() {
    const acc = this.#acc.slice();
    const stripes = Math.floor((this.#count - 1) / 64);
    for (let i = 0; i < stripes; i++) accumulate(acc, this.#heldWords, 16 + 16 * i, KEYS, 2 * i);
    const last = new Int32Array(this.#held.slice(this.#count, this.#count + 64).buffer);
    accumulate(acc, last, 0, LAST_KEYS, 0);
    const halves = Array.from(new BigUint64Array(acc.buffer));
    const n = BigInt(this.#length);
    return [merge(halves, 117, ~(n * P64[2]) & M), merge(halves, 11, (n * P64[1]) & M)];
  }
}

export function xxh3(bytes) {
  return new Digest().update(bytes).finish();
}

// Products of 64 bits modulo 2^64 by a prime, of numbers in 32-bit halves: the result is left in `low` and
// `high`.
let low = 0;
let high = 0;

function multiply(l, h, pl, ph) {
  const [a, b, c, d] = [l & 0xffff, l >>> 16, pl & 0xffff, pl >>> 16];
  const t = b * c + ((a * c) >>> 16);
  const u = a * d + (t & 0xffff);
  const upper = b * d + Math.floor(t / 65536) + Math.floor(u / 65536);
  low = Math.imul(l, pl);
  high = (upper + Math.imul(l, ph) + Math.imul(h, pl)) | 0;
}

const [A1, A2, B1, B2] = [P64[1] & 0xffffffffn, P64[1] >> 32n, P64[2] & 0xffffffffn, P64[2] >> 32n].map(
  Number,
);

export function xxh64(bytes) {
  const n = bytes.length;
  const stripes = Math.floor(n / 32);
  let h = P64[5];
  if (stripes) {
    const lanes = new Int32Array(8);
    [P64[1] + P64[2], P64[2], 0n, -P64[1]].forEach((value, i) => {
      lanes[2 * i] = Number(value & 0xffffffffn);
      lanes[2 * i + 1] = Number((value & M) >> 32n);
    });
    const source = bytes.byteOffset % 4 ? bytes.slice(0, 32 * stripes) : bytes;
    const words = new Int32Array(source.buffer, source.byteOffset, 8 * stripes);
    for (let at = 0; at < words.length; at += 8)
      for (let i = 0; i < 8; i += 2) {
        multiply(words[at + i], words[at + i + 1], B1, B2);
        const sum = (lanes[i] >>> 0) + (low >>> 0);
        const l = sum | 0;
        const u = (lanes[i + 1] + high + (sum > 0xffffffff ? 1 : 0)) | 0;
        multiply((l << 31) | (u >>> 1), (u << 31) | (l >>> 1), A1, A2);
        lanes[i] = low;
        lanes[i + 1] = high;
      }
    const v = Array.from(new BigUint64Array(lanes.buffer));
    h = (rotate(v[0], 1n) + rotate(v[1], 7n) + rotate(v[2], 12n) + rotate(v[3], 18n)) & M;
    for (const lane of v) h = ((h ^ round(0n, lane)) * P64[1] + P64[4]) & M;
  }
  return xxh64Rest(bytes, 32 * stripes, (h + BigInt(n)) & M);
}

const rotate = (x, bits) => ((x << bits) | (x >> (64n - bits))) & M;
const round = (acc, input) => (rotate((acc + input * P64[2]) & M, 31n) * P64[1]) & M;

function xxh64Rest(bytes, at, h) {
  const data = viewOf(bytes);
  for (; at + 8 <= bytes.length; at += 8)
    h = (rotate(h ^ round(0n, data.getBigUint64(at, true)), 27n) * P64[1] + P64[4]) & M;
  if (at + 4 <= bytes.length) {
    h = (rotate(h ^ ((BigInt(data.getUint32(at, true)) * P64[1]) & M), 23n) * P64[2] + P64[3]) & M;
    at += 4;
  }
  for (; at < bytes.length; at++) h = (rotate(h ^ ((BigInt(bytes[at]) * P64[5]) & M), 11n) * P64[1]) & M;
  return avalanche64(h);
}

// The checksum of a row (row.md): its words as the digits of a number to the base X, modulo 2^64; words 6 and
// 7 count as 0.
export function rowChecksum(bytes) {
  const words = view(bytes, Int32Array);
  let [l, h] = [0, 0];
  for (let i = 0; i < words.length; i++) {
    multiply(l, h, 0x7f4a7c15, 0x9e3779b9);
    const sum = (low >>> 0) + (i === 6 || i === 7 ? 0 : words[i] >>> 0);
    l = sum | 0;
    h = (high + (sum > 0xffffffff ? 1 : 0)) | 0;
  }
  return (BigInt(h >>> 0) << 32n) | BigInt(l >>> 0);
}
