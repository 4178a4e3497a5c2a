// Zstandard frames (RFC 8878), as container.md (zstd) restricts them.

import { aboveLimit, badPayload } from "./errors.js";
import { littleEndian } from "./numbers.js";
import { xxh64 } from "./xxhash.js";

const MAX_WINDOW = 8388608;
const MAX_RATIO = 256;
const malformed = (what) => badPayload("container-21", `malformed zstd frame: ${what}`);

// The position of the highest bit of a number from 1 on.
const highest = (x) => 31 - Math.clz32(x);

// Bits that are read from the last byte to the first, after the highest set bit of the last byte.
class BackwardBits {
  constructor(bytes, from, to) {
    if (to <= from || bytes[to - 1] === 0) malformed("a stream of bits without its end mark");
    this.bytes = bytes;
    this.from = 8 * from;
    this.at = 8 * (to - 1) + highest(bytes[to - 1]);
  }

  // The next `count` bits, at most 24; missing ones are 0 and leave `at` before `from`.
  read(count) {
    this.at -= count;
    return this.peek(this.at, count);
  }

  peek(at, count) {
    if (count === 0) return 0;
    if (at < this.from) {
      const missing = this.from - at;
      return missing >= count ? 0 : this.peek(this.from, count - missing) << missing;
    }
    const byte = at >> 3;
    const { bytes } = this;
    const bits = bytes[byte] | (bytes[byte + 1] << 8) | (bytes[byte + 2] << 16) | (bytes[byte + 3] << 24);
    return (bits >>> (at & 7)) & ((1 << count) - 1);
  }

  get left() {
    return this.at - this.from;
  }
}

// The distribution of an FSE table from byte `at` on: { counts, log, end }.
function readDistribution(bytes, at, end, maxLog, maxSymbol) {
  let bit = 8 * at;
  const read = (count) => {
    let value = 0;
    for (let i = 0; i < count; i++, bit++) {
      if (bit >> 3 >= end) malformed("a table of frequencies that is cut short");
      value |= ((bytes[bit >> 3] >> (bit & 7)) & 1) << i;
    }
    return value;
  };
  const log = read(4) + 5;
  if (log > maxLog) malformed(`a table of ${log} bits, at most ${maxLog}`);
  let left = 1 << log;
  const counts = [];
  while (left > 0) {
    if (counts.length > maxSymbol) malformed("a table of too many symbols");
    const bits = highest(left + 1) + 1;
    let value = read(bits - 1);
    const shorter = (1 << bits) - 1 - (left + 1);
    if (value >= shorter) {
      value |= read(1) << (bits - 1);
      if (value >= 1 << (bits - 1)) value -= shorter;
    }
    const count = value - 1;
    counts.push(count);
    left -= Math.abs(count);
    if (count === 0)
      for (let more = 3; more === 3;) {
        more = read(2);
        for (let i = 0; i < more; i++) counts.push(0);
      }
  }
  if (left < 0 || counts.length > maxSymbol + 1) malformed("a table of frequencies of another sum");
  return { counts, log, end: (bit + 7) >> 3 };
}

function buildTable(counts, log) {
  const size = 1 << log;
  const symbols = new Uint8Array(size);
  const bits = new Uint8Array(size);
  const bases = new Uint16Array(size);
  const next = new Uint16Array(counts.length);
  let top = size;
  counts.forEach((count, symbol) => {
    next[symbol] = Math.abs(count);
    if (count === -1) symbols[--top] = symbol;
  });
  const step = (size >> 1) + (size >> 3) + 3;
  let at = 0;
  counts.forEach((count, symbol) => {
    for (let i = 0; i < count; i++) {
      symbols[at] = symbol;
      do at = (at + step) & (size - 1);
      while (at >= top);
    }
  });
  for (let i = 0; i < size; i++) {
    const state = next[symbols[i]]++;
    bits[i] = log - highest(state);
    bases[i] = (state << bits[i]) - size;
  }
  return { log, symbols, bits, bases };
}

const oneSymbol = (symbol) => ({
  log: 0,
  symbols: new Uint8Array([symbol]),
  bits: new Uint8Array(1),
  bases: new Uint16Array(1),
});

// The baselines and numbers of extra bits of the codes of literal lengths, match lengths and offsets.
function codes(first, direct, extra) {
  const bases = [];
  const bits = [];
  let base = first;
  for (const count of [...new Array(direct).fill(0), ...extra]) {
    bases.push(base);
    bits.push(count);
    base += 2 ** count;
  }
  return { bases, bits };
}

const LITERALS = codes(0, 16, [1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
const MATCHES = codes(3, 32, [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]);
const ones = (count, value = 1) => new Array(count).fill(value);
const KINDS = [
  {
    maxLog: 9,
    maxSymbol: 35,
    usual: buildTable([4, 3, ...ones(11, 2), 1, 1, 1, ...ones(9, 2), 3, 2, ...ones(5), ...ones(4, -1)], 6),
  },
  { maxLog: 8, maxSymbol: 31, usual: buildTable([...ones(6), 2, 2, 2, ...ones(15), ...ones(5, -1)], 5) },
  { maxLog: 9, maxSymbol: 52, usual: buildTable([1, 4, 3, ...ones(6, 2), ...ones(37), ...ones(7, -1)], 6) },
];

// The table of Huffman codes from byte `at` on: look-ups of `log` bits give a symbol and the length of its
// code.
function readTree(bytes, at, end) {
  if (at >= end) malformed("literals without a Huffman tree");
  const head = bytes[at++];
  const weights = [];
  if (head >= 128) {
    const count = head - 127;
    if (at + ((count + 1) >> 1) > end) malformed("a Huffman tree that is cut short");
    for (let i = 0; i < count; i++)
      weights.push(i % 2 ? bytes[at + (i >> 1)] & 15 : bytes[at + (i >> 1)] >> 4);
    at += (count + 1) >> 1;
  } else {
    if (at + head > end) malformed("a Huffman tree that is cut short");
    const distribution = readDistribution(bytes, at, at + head, 6, 255);
    readWeights(bytes, distribution, at + head, weights);
    at += head;
  }
  let sum = 0;
  for (const weight of weights) if (weight) sum += 2 ** (weight - 1);
  if (sum === 0) malformed("a Huffman tree without weights");
  const log = Math.floor(Math.log2(sum)) + 1;
  if (log > 11) malformed(`a Huffman tree of depth ${log}`);
  const rest = 2 ** log - sum;
  if (Math.log2(rest) % 1) malformed("weights of a Huffman tree that leave no last weight");
  weights.push(Math.log2(rest) + 1);
  if (weights.length > 256) malformed("a Huffman tree of too many symbols");
  const symbols = new Uint8Array(1 << log);
  const lengths = new Uint8Array(1 << log);
  let next = 0;
  for (let weight = 1; weight <= log; weight++)
    weights.forEach((value, symbol) => {
      if (value !== weight) return;
      const count = 1 << (weight - 1);
      symbols.fill(symbol, next, next + count);
      lengths.fill(log + 1 - weight, next, next + count);
      next += count;
    });
  return { tree: { log, symbols, lengths }, at };
}

function readWeights(bytes, { counts, log, end: from }, end, weights) {
  const table = buildTable(counts, log);
  const bits = new BackwardBits(bytes, from, end);
  const states = [bits.read(log), bits.read(log)];
  if (bits.left < 0) malformed("weights that are cut short");
  for (let turn = 0; ; turn ^= 1) {
    const state = states[turn];
    weights.push(table.symbols[state]);
    if (weights.length > 254) malformed("a Huffman tree of too many symbols");
    states[turn] = table.bases[state] + bits.read(table.bits[state]);
    if (bits.left < 0) {
      weights.push(table.symbols[states[turn ^ 1]]);
      return;
    }
  }
}

function readHuffman(bytes, from, to, tree, out, start, count) {
  const bits = new BackwardBits(bytes, from, to);
  const { log, symbols, lengths } = tree;
  for (let i = start; i < start + count; i++) {
    const code = bits.peek(bits.at - log, log);
    out[i] = symbols[code];
    bits.at -= lengths[code];
  }
  if (bits.left !== 0) malformed("literals that take other bits than their stream has");
}

// One frame's state: what blocks pass on to later ones.
class Frame {
  constructor(bytes, size) {
    this.bytes = bytes;
    this.out = new Uint8Array(size);
    this.length = 0;
    this.tree = null;
    this.tables = [null, null, null];
    this.offsets = [1, 4, 8];
  }

  room(count) {
    if (count > this.out.length - this.length)
      badPayload("container-24", `blocks make more than the ${this.out.length} bytes of the content size`);
  }

  append(bytes) {
    this.room(bytes.length);
    this.out.set(bytes, this.length);
    this.length += bytes.length;
  }

  compressed(at, end, maxBlock) {
    const { literals, next } = this.literals(at, end, maxBlock);
    at = next;
    if (at >= end) malformed("a block without sequences");
    let count = this.bytes[at++];
    if (count >= 128) {
      if (at + (count === 255 ? 2 : 1) > end) malformed("a block that is cut short");
      if (count === 255) {
        count = this.bytes[at] + (this.bytes[at + 1] << 8) + 0x7f00;
        at += 2;
      } else count = ((count - 128) << 8) + this.bytes[at++];
    }
    const start = this.length;
    if (count) this.sequences(at, end, count, literals);
    else {
      if (at !== end) malformed("bytes after a block without sequences");
      this.append(literals);
    }
    if (this.length - start > maxBlock) malformed("a block of too many bytes");
  }

  literals(at, end, maxBlock) {
    const { bytes } = this;
    const head = bytes[at];
    const type = head & 3;
    const format = (head >> 2) & 3;
    const width = type < 2 ? [1, 2, 1, 3][format] : [3, 3, 4, 5][format];
    if (at + width > end) malformed("literals that are cut short");
    const number = Number(littleEndian(bytes, at, width));
    at += width;
    if (type < 2) {
      const count = number >> (format & 1 ? 4 : 3);
      if (count > maxBlock) malformed("too many literals");
      if (at + (type ? 1 : count) > end) malformed("literals that are cut short");
      return type
        ? { literals: new Uint8Array(count).fill(bytes[at]), next: at + 1 }
        : { literals: bytes.subarray(at, at + count), next: at + count };
    }
    const bits = [10, 10, 14, 18][format];
    const count = Math.floor(number / 16) % 2 ** bits;
    const size = Math.floor(number / 2 ** (4 + bits)) % 2 ** bits;
    if (count > maxBlock) malformed("too many literals");
    const stop = at + size;
    if (stop > end) malformed("literals that are cut short");
    if (type === 2) ({ tree: this.tree, at } = readTree(bytes, at, stop));
    else if (!this.tree) malformed("literals by the tree of a block that has none");
    const literals = new Uint8Array(count);
    if (format === 0) readHuffman(bytes, at, stop, this.tree, literals, 0, count);
    else this.fourStreams(at, stop, literals);
    return { literals, next: stop };
  }

  fourStreams(at, stop, literals) {
    const { bytes } = this;
    const each = (literals.length + 3) >> 2;
    if (at + 6 > stop || 3 * each > literals.length) malformed("four streams that are too short");
    let from = at + 6;
    for (let i = 0; i < 4; i++) {
      const to = i < 3 ? from + bytes[at + 2 * i] + (bytes[at + 2 * i + 1] << 8) : stop;
      if (to > stop) malformed("streams that are longer than their block");
      const count = i < 3 ? each : literals.length - 3 * each;
      readHuffman(bytes, from, to, this.tree, literals, each * i, count);
      from = to;
    }
  }

  sequences(at, end, count, literals) {
    const { bytes } = this;
    if (at >= end) malformed("sequences that are cut short");
    const modes = bytes[at++];
    if (modes & 3) malformed("reserved modes of sequences");
    KINDS.forEach(({ maxLog, maxSymbol, usual }, kind) => {
      const mode = (modes >> (6 - 2 * kind)) & 3;
      if (mode === 0) this.tables[kind] = usual;
      else if (mode === 1) {
        if (at >= end || bytes[at] > maxSymbol) malformed("a code that is out of range");
        this.tables[kind] = oneSymbol(bytes[at++]);
      } else if (mode === 2) {
        const distribution = readDistribution(bytes, at, end, maxLog, maxSymbol);
        this.tables[kind] = buildTable(distribution.counts, distribution.log);
        at = distribution.end;
      } else if (!this.tables[kind]) malformed("the tables of a block that has none");
    });
    const bits = new BackwardBits(bytes, at, end);
    const [lengths, offsets, matches] = this.tables;
    let length = bits.read(lengths.log);
    let offset = bits.read(offsets.log);
    let match = bits.read(matches.log);
    let taken = 0;
    for (let i = 0; i < count; i++) {
      const code = offsets.symbols[offset];
      const upper = code > 16 ? bits.read(code - 16) * 65536 : 0;
      const distance = 2 ** code + upper + bits.read(Math.min(code, 16));
      const m = matches.symbols[match];
      const matched = MATCHES.bases[m] + bits.read(MATCHES.bits[m]);
      const l = lengths.symbols[length];
      const literal = LITERALS.bases[l] + bits.read(LITERALS.bits[l]);
      if (i < count - 1) {
        length = lengths.bases[length] + bits.read(lengths.bits[length]);
        match = matches.bases[match] + bits.read(matches.bits[match]);
        offset = offsets.bases[offset] + bits.read(offsets.bits[offset]);
      }
      if (bits.left < 0) malformed("sequences that are cut short");
      if (literal > literals.length - taken) malformed("sequences that take more literals than there are");
      this.copy(literals.subarray(taken, taken + literal), matched, this.repeated(distance, literal));
      taken += literal;
    }
    if (bits.left !== 0) malformed("bits after the last sequence");
    this.append(literals.subarray(taken));
  }

  // The distance of a match, of which the values 1 to 3 stand for earlier ones.
  repeated(value, literal) {
    const [a, b, c] = this.offsets;
    if (value > 3) this.offsets = [value - 3, a, b];
    else {
      const index = value - (literal ? 1 : 0);
      if (index === 1) this.offsets = [b, a, c];
      else if (index === 2) this.offsets = [c, a, b];
      else if (index === 3) this.offsets = [a - 1, a, b];
      if (this.offsets[0] === 0) malformed("a distance of 0");
    }
    return this.offsets[0];
  }

  copy(literals, matched, distance) {
    this.room(literals.length + matched);
    this.append(literals);
    const { out, length: at } = this;
    if (distance > at) malformed("a match from before the content");
    if (distance >= matched) out.copyWithin(at, at - distance, at - distance + matched);
    else for (let to = at; to < at + matched; to++) out[to] = out[to - distance];
    this.length += matched;
  }
}

// The `size` bytes of the only frame in `bytes`; `checked`: the file has the feature zstd-checksum.
export function decompress(bytes, size, checked) {
  if (size > MAX_RATIO * bytes.length)
    aboveLimit(`a tensor of ${size} bytes is stored in ${bytes.length}: above MAX_RATIO, ${MAX_RATIO}`);
  const need = (at, count) => at + count > bytes.length && malformed("it is cut short");
  need(0, 5);
  if (littleEndian(bytes, 0, 4) !== 0xfd2fb528n) malformed("another magic number");
  const head = bytes[4];
  const single = (head >> 5) & 1;
  if (head & 8) malformed("a reserved bit");
  const dictionaryBytes = [0, 1, 2, 4][head & 3];
  const sizeBytes = [single, 2, 4, 8][head >> 6];
  let at = 5;
  need(at, 1 - single + dictionaryBytes + sizeBytes);
  let window = 0;
  if (!single) {
    const base = 2 ** (10 + (bytes[at] >> 3));
    window = base + (base / 8) * (bytes[at++] & 7);
  }
  const dictionary = littleEndian(bytes, at, dictionaryBytes);
  if (dictionary) badPayload("container-25", `a zstd frame needs the dictionary ${dictionary}`);
  at += dictionaryBytes;
  if (!sizeBytes) badPayload("container-22", "a zstd frame does not give its content size");
  const given = littleEndian(bytes, at, sizeBytes) + (sizeBytes === 2 ? 256n : 0n);
  if (given !== BigInt(size))
    badPayload("container-23", `a zstd frame of ${given} bytes holds a tensor of ${size} bytes`);
  at += sizeBytes;
  if (single) window = size;
  if (window > MAX_WINDOW)
    badPayload("container-26", `a zstd window of ${window} bytes is above ${MAX_WINDOW}`);
  if (checked && !(head & 4)) badPayload("container-65", "a zstd frame has no content checksum");
  return readBlocks(bytes, at, size, Math.min(window, 131072), head & 4);
}

function readBlocks(bytes, at, size, maxBlock, checksum) {
  const frame = new Frame(bytes, size);
  const need = (count) => at + count > bytes.length && malformed("it is cut short");
  for (let last = 0; !last;) {
    need(3);
    const block = Number(littleEndian(bytes, at, 3));
    at += 3;
    last = block & 1;
    const type = (block >> 1) & 3;
    const length = block >> 3;
    if (type === 3) malformed("a block of a reserved type");
    need(type === 1 ? 1 : length);
    if (length > maxBlock) malformed("a block of too many bytes");
    if (type === 2) frame.compressed(at, at + length, maxBlock);
    else frame.append(type ? new Uint8Array(length).fill(bytes[at]) : bytes.subarray(at, at + length));
    at += type === 1 ? 1 : length;
  }
  if (frame.length !== size) badPayload("container-24", `blocks make ${frame.length} bytes of ${size}`);
  if (checksum) {
    need(4);
    if (littleEndian(bytes, at, 4) !== (xxh64(frame.out) & 0xffffffffn))
      badPayload("container-33", "the content of a zstd frame does not have its checksum");
    at += 4;
  }
  if (at !== bytes.length) malformed("bytes after it");
  return frame.out;
}
