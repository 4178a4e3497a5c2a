// XXH3-128 (container.md, Digests), XXH64 (of zstd frames), both with seed 0, and the checksum of rows. Long
// inputs are hashed in 32-bit halves; BigInt is for at most 240 bytes and for what is done once.
import { concat, view, viewOf } from "./numbers.js";

const SECRET_HEX =
  "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221" +
  "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8" +
  "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb" +
  "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e";
const SECRET = Uint8Array.from(SECRET_HEX.match(/../g), (pair) => parseInt(pair, 16));
const P32 = [0n, 0x9e3779b1n, 0x85ebca77n, 0xc2b2ae3dn];
const P64 = [0n, 0x9e3779b185ebca87n, 0xc2b2ae3d27d4eb4fn, 0x165667b19e3779f9n, 0x85ebca77c2b2ae63n];
P64.push(0x27d4eb2f165667c5n);
const wrap = (x) => BigInt.asUintN(64, x);
const secret = viewOf(SECRET);
const key = (at) => secret.getBigUint64(at, true);
const rotate = (x, bits) => wrap((x << bits) | (x >> (64n - bits)));
const fold = (product) => wrap(product) ^ (product >> 64n);
// The last steps of hashes of 64 bits: those of XXH3, and those of XXH64.
function mixed(h, first, factor, second) {
  const product = wrap((h ^ (h >> first)) * factor);
  return product ^ (product >> second);
}
const avalanche = (h) => mixed(wrap(h), 37n, 0x165667919e3779f9n, 32n);
const avalanche64 = (h) => mixed(wrap((h ^ (h >> 33n)) * P64[2]), 29n, P64[3], 32n);
const swap = (x) => new DataView(BigUint64Array.of(x).buffer).getBigUint64(0);
// The high and the low half of the XXH3-128 of at most 240 bytes.
function shortHash(bytes) {
  const { length } = bytes;
  const [data, n] = [viewOf(bytes), BigInt(length)];
  const u32 = (at, of = data) => BigInt(of.getUint32(at, true));
  const u64 = (at) => data.getBigUint64(at, true);
  if (length > 16) return middleHash(length, u64);
  if (length > 8) {
    const end = u64(length - 8);
    const first = (u64(0) ^ end ^ key(32) ^ key(40)) * P64[1];
    const high = end ^ key(48) ^ key(56);
    const upper = wrap((first >> 64n) + high + (high & 0xffffffffn) * (P32[2] - 1n));
    const product = (wrap(first + ((n - 1n) << 54n)) ^ swap(upper)) * P64[2];
    return [(product >> 64n) + upper * P64[2], product].map(avalanche);
  }
  if (length > 3) {
    const input = u32(0) | (u32(length - 4) << 32n);
    const product = (input ^ key(16) ^ key(24)) * wrap(P64[1] + (n << 2n));
    const high = wrap((product >> 64n) + (product << 1n));
    return [avalanche(high), mixed(wrap(product) ^ (high >> 3n), 35n, 0x9fb21c651e98df25n, 28n)];
  }
  if (!length) return [key(80) ^ key(88), key(64) ^ key(72)].map(avalanche64);
  const [first, middle, end] = [bytes[0], bytes[length >> 1], bytes[length - 1]].map(BigInt);
  const low = (first << 16n) | (middle << 24n) | end | (n << 8n);
  const other = swap(low) >> 32n;
  const high = BigInt.asUintN(32, (other << 13n) | (other >> 19n));
  return [high ^ u32(8, secret) ^ u32(12, secret), low ^ u32(0, secret) ^ u32(4, secret)].map(avalanche64);
}

function middleHash(length, u64) {
  const n = BigInt(length);
  let [low, high] = [wrap(n * P64[1]), 0n];
  const mix16 = (at, from) => fold((u64(at) ^ key(from)) * (u64(at + 8) ^ key(from + 8)));
  const mix = (a, b, from) => {
    low = wrap(low + mix16(a, from)) ^ wrap(u64(b) + u64(b + 8));
    high = wrap(high + mix16(b, from + 16)) ^ wrap(u64(a) + u64(a + 8));
  };
  if (length <= 128) {
    for (let i = (length - 1) >> 5; i >= 0; i--) mix(16 * i, length - 16 - 16 * i, 32 * i);
  } else {
    for (let i = 0; i < 128; i += 32) mix(i, i + 16, i);
    [low, high] = [low, high].map(avalanche);
    for (let i = 160; i <= length; i += 32) mix(i - 32, i - 16, i - 157);
    mix(length - 16, length - 32, 103);
  }
  return [wrap(-avalanche(low * P64[1] + high * P64[4] + n * P64[2])), avalanche(low + high)];
}
// The upper half of the 64-bit product of two 32-bit numbers, by 16-bit parts.
function upperHalf(x, y) {
  const [a, b, c, d] = [x & 0xffff, x >>> 16, y & 0xffff, y >>> 16];
  const t = b * c + ((a * c) >>> 16);
  const u = a * d + (t & 0xffff);
  return (b * d + Math.floor(t / 65536) + Math.floor(u / 65536)) | 0;
}
// Arrays of 64-bit numbers have their low and high halves alternating. Add a number to the one at index i.
function add(numbers, i, low, high) {
  const sum = (numbers[i] >>> 0) + (low >>> 0);
  numbers[i] = sum | 0;
  numbers[i + 1] = (numbers[i + 1] + high + (sum > 0xffffffff ? 1 : 0)) | 0;
}

function multiply(numbers, i, low, high) {
  const [l, h] = [numbers[i], numbers[i + 1]];
  numbers[i] = Math.imul(l, low);
  numbers[i + 1] = (upperHalf(l, low) + Math.imul(l, high) + Math.imul(h, low)) | 0;
}
const halves = (...numbers) => new Int32Array(BigUint64Array.from(numbers, wrap).buffer);
const INITIAL = halves(P32[3], P64[1], P64[2], P64[3], P64[4], P32[2], P64[5], P32[1]);
const KEYS = new Int32Array(SECRET.buffer);
const LAST_KEYS = new Int32Array(SECRET.slice(121, 185).buffer);
const [STRIPE, BLOCK] = [64, 1024];
// One stripe, from word `at` of `words` on, by the secret from word `from` of `keys` on.
function accumulate(acc, words, at, keys, from) {
  for (let i = 0; i < 16; i += 2) {
    const low = words[at + i];
    const high = words[at + i + 1];
    const x = low ^ keys[from + i];
    const y = high ^ keys[from + i + 1];
    add(acc, i, Math.imul(x, y), upperHalf(x, y));
    add(acc, i ^ 2, low, high);
  }
}

function scramble(acc) {
  for (let i = 0; i < 16; i += 2) {
    acc[i] ^= (acc[i + 1] >>> 15) ^ KEYS[32 + i];
    acc[i + 1] ^= KEYS[33 + i];
    multiply(acc, i, 0x9e3779b1, 0);
  }
}
const joined = (numbers) => Array.from(new BigUint64Array(numbers.buffer));
// The XXH3-128 of bytes that come in pieces; all but the last have a multiple of 1,024 bytes.
export class Digest {
  #acc = INITIAL.slice();
  #length = 0;
  // The last piece, which is hashed once another follows it, and the 64 bytes before it.
  #piece = new Uint8Array(0);
  #before = new Uint8Array(STRIPE);
  update(bytes) {
    if (!bytes.length) return this;
    this.#hash(this.#piece.length / STRIPE);
    if (this.#length) this.#before = this.#piece.slice(-STRIPE);
    this.#piece = bytes;
    this.#length += bytes.length;
    return this;
  }
  #hash(stripes) {
    const words = view(this.#piece.subarray(0, STRIPE * stripes), Int32Array);
    const acc = this.#acc;
    for (let i = 0; i < stripes; i++) {
      accumulate(acc, words, 16 * i, KEYS, 2 * (i & 15));
      if ((i & 15) === 15) scramble(acc);
    }
  }
  // The digest in canonical form: 16 bytes, most significant first.
  finish() {
    const parts = this.#length <= 240 ? shortHash(this.#piece) : this.#long();
    return new Uint8Array(BigUint64Array.from(parts.reverse()).buffer).reverse();
  }
  #long() {
    this.#hash(Math.floor((this.#piece.length - 1) / STRIPE));
    const last = concat(this.#before, this.#piece.slice(-STRIPE)).slice(-STRIPE);
    accumulate(this.#acc, view(last, Int32Array), 0, LAST_KEYS, 0);
    const numbers = joined(this.#acc);
    const mix = (i, from) =>
      fold((numbers[i] ^ key(from + 8 * i)) * (numbers[i + 1] ^ key(from + 8 * i + 8)));
    const merge = (from, sum) => avalanche([0, 2, 4, 6].reduce((all, i) => all + mix(i, from), sum));
    const n = BigInt(this.#length);
    return [merge(117, ~(n * P64[2])), merge(11, n * P64[1])];
  }
}
export const xxh3 = (bytes) => new Digest().update(bytes).finish();
const [A, B] = [halves(P64[1]), halves(P64[2])];

export function xxh64(bytes) {
  const stripes = Math.floor(bytes.length / 32);
  let h = P64[5];
  if (stripes) {
    const lanes = halves(P64[1] + P64[2], P64[2], 0n, -P64[1]);
    const words = view(bytes.subarray(0, 32 * stripes), Int32Array).slice();
    for (let at = 0; at < words.length; at += 8)
      for (let i = 0; i < 8; i += 2) {
        multiply(words, at + i, B[0], B[1]);
        add(lanes, i, words[at + i], words[at + i + 1]);
        const [l, u] = [lanes[i], lanes[i + 1]];
        lanes[i] = (l << 31) | (u >>> 1);
        lanes[i + 1] = (u << 31) | (l >>> 1);
        multiply(lanes, i, A[0], A[1]);
      }
    const numbers = joined(lanes);
    h = numbers.reduce((sum, lane, i) => sum + rotate(lane, [1n, 7n, 12n, 18n][i]), 0n);
    for (const lane of numbers) h = step(h, round(lane));
  }
  h = wrap(h + BigInt(bytes.length));
  const data = viewOf(bytes);
  let at = 32 * stripes;
  for (; at + 8 <= bytes.length; at += 8) h = step(h, round(data.getBigUint64(at, true)), 27n);
  if (bytes.length & 4) h = step(h, BigInt(data.getUint32(at, true)) * P64[1], 23n, P64[2], P64[3]);
  for (at += bytes.length & 4; at < bytes.length; at++)
    h = step(h, BigInt(bytes[at]) * P64[5], 11n, P64[1], 0n);
  return avalanche64(h);
}
const round = (input) => rotate(wrap(input * P64[2]), 31n) * P64[1];
const step = (h, x, bits = 0n, p = P64[1], q = P64[4]) => wrap(rotate(wrap(h ^ x), bits) * p + q);
// The checksum of a row (row.md): its words, 6 and 7 as 0, as digits of a number to the base X, modulo 2^64.
export function rowChecksum(bytes) {
  const words = view(bytes, Int32Array);
  const sum = new Int32Array(2);
  for (let i = 0; i < words.length; i++) {
    multiply(sum, 0, 0x7f4a7c15, 0x9e3779b9);
    add(sum, 0, i === 6 || i === 7 ? 0 : words[i], 0);
  }
  return new BigUint64Array(sum.buffer)[0];
}
