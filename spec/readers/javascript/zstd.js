// Zstandard frames (RFC 8878), as container.md (zstd) restricts them.
import { badPayload, limit, must } from "./errors.js";
import { Cursor, range } from "./numbers.js";
import { xxh64 } from "./xxhash.js";

const [MAX_WINDOW, MAX_RATIO, MAX_BLOCK] = [8388608, 256, 131072];
const malformed = (what) => badPayload("container-21", `malformed zstd frame: ${what}`);
const expect = (kept, what) => kept || malformed(what);
// The position of the highest bit of a number from 1 on.
const highest = (x) => 31 - Math.clz32(x);
// Bits of a cursor that are read from the last byte to the first, after the highest set bit of the last byte.
class BackwardBits {
  constructor({ bytes, at, end }) {
    expect(end > at && bytes[end - 1], "a stream of bits without its end mark");
    this.bytes = bytes;
    this.from = 8 * at;
    this.left = 8 * (end - 1 - at) + highest(bytes[end - 1]);
  }
  // The next `count` bits, at most 24; missing ones are 0, and make `left` negative once they are read.
  peek(count) {
    const { bytes, from, left } = this;
    const missing = Math.max(count - left, 0);
    if (count === 0 || missing >= count) return 0;
    const at = from + left - count + missing;
    const byte = at >> 3;
    const bits = bytes[byte] | (bytes[byte + 1] << 8) | (bytes[byte + 2] << 16) | (bytes[byte + 3] << 24);
    return ((bits >>> (at & 7)) & ((1 << (count - missing)) - 1)) << missing;
  }
  read(count) {
    const result = this.peek(count);
    this.left -= count;
    return result;
  }
  next = ({ bases, bits }, state) => bases[state] + this.read(bits[state]);
}

function readTable(cursor, maxLog, maxSymbol) {
  let bit = 8 * cursor.at;
  const read = (count) => {
    let value = 0;
    for (let i = 0; i < count; i++, bit++) {
      if (bit >> 3 >= cursor.end) cursor.cut();
      value |= ((cursor.bytes[bit >> 3] >> (bit & 7)) & 1) << i;
    }
    return value;
  };
  const log = read(4) + 5;
  expect(log <= maxLog, `a table of ${log} bits, at most ${maxLog}`);
  let left = 1 << log;
  const counts = [];
  while (left > 0) {
    expect(counts.length <= maxSymbol, "a table of too many symbols");
    const bits = highest(left + 1) + 1;
    let value = read(bits - 1);
    const shorter = (1 << bits) - 2 - left;
    if (value >= shorter) value |= read(1) << (bits - 1);
    if (value >= 1 << (bits - 1)) value -= shorter;
    counts.push(value - 1);
    left -= Math.abs(value - 1);
    for (let more = value === 1 ? 3 : 0; more === 3;) {
      more = read(2);
      counts.push(...range(more, () => 0));
    }
  }
  expect(left === 0 && counts.length <= maxSymbol + 1, "a table of frequencies of another sum");
  cursor.at = (bit + 7) >> 3;
  return buildTable(counts, log);
}

function buildTable(counts, log) {
  const size = 1 << log;
  const symbols = new Uint8Array(size);
  let top = size;
  for (const [symbol, count] of counts.entries()) if (count === -1) symbols[--top] = symbol;
  let at = 0;
  for (const [symbol, count] of counts.entries())
    for (let i = 0; i < count; i++) {
      symbols[at] = symbol;
      do at = (at + (size >> 1) + (size >> 3) + 3) & (size - 1);
      while (at >= top);
    }
  const next = counts.map(Math.abs);
  const states = Uint16Array.from(symbols, (symbol) => next[symbol]++);
  const bits = Uint8Array.from(states, (state) => log - highest(state));
  return { log, symbols, bits, bases: states.map((state, i) => (state << bits[i]) - size) };
}
// The numbers of a text: 2*11 for eleven numbers 2, and 6..16 for those from 6 to 16.
function numbersOf(text) {
  return text.split(" ").flatMap((word) => {
    const [first, last] = word.split(/\*|\.\./).map(Number);
    return word.includes("*") ? range(last, () => first) : range(last - first + 1, (i) => first + i);
  });
}
// A kind of codes of sequences: its predefined distribution, and the first number and extra bits of codes.
function kind(maxLog, distribution, log, first, bits) {
  const extra = numbersOf(bits);
  const starts = extra.map((_, i) => extra.slice(0, i).reduce((sum, count) => sum + 2 ** count, first));
  const usual = buildTable(numbersOf(distribution), log);
  return { maxLog, maxSymbol: extra.length - 1, usual, starts, extra };
}
// The kinds of lengths of literals, of distances and of lengths of matches.
const KINDS = [
  kind(9, "4*1 3*1 2*11 1*3 2*9 3*1 2*1 1*5 -1*4", 6, 0, "0*16 1*4 2*2 3*2 4*1 6..16"),
  kind(8, "1*6 2*3 1*15 -1*5", 5, 1, "0..31"),
  kind(9, "1*1 4*1 3*1 2*6 1*37 -1*7", 6, 3, "0*32 1*4 2*2 3*2 4*2 5*1 7..16"),
];
// The number of a code of a kind, and of the extra bits that follow.
function number(bits, index, code) {
  const { starts, extra } = KINDS[index];
  const upper = extra[code] > 16 ? bits.read(extra[code] - 16) * 65536 : 0;
  return starts[code] + upper + bits.read(Math.min(extra[code], 16));
}

function readWeights(cursor) {
  const head = cursor.number(1);
  if (head >= 128) {
    const bytes = cursor.take((head - 126) >> 1);
    return range(head - 127, (i) => (i % 2 ? bytes[i >> 1] & 15 : bytes[i >> 1] >> 4));
  }
  const own = cursor.part(head);
  const [table, bits] = [readTable(own, 6, 255), new BackwardBits(own)];
  const states = [bits.read(table.log), bits.read(table.log)];
  expect(bits.left >= 0, "weights that are cut short");
  const weights = [];
  for (let turn = 0; bits.left >= 0; turn ^= 1) {
    weights.push(table.symbols[states[turn]]);
    expect(weights.length < 255, "a Huffman tree of too many symbols");
    states[turn] = bits.next(table, states[turn]);
    if (bits.left < 0) weights.push(table.symbols[states[turn ^ 1]]);
  }
  return weights;
}
// A table of Huffman codes: `log` bits give a symbol and the length of its code.
function readTree(cursor) {
  const weights = readWeights(cursor);
  const sum = weights.reduce((total, weight) => total + (weight && 2 ** (weight - 1)), 0);
  const log = highest(sum) + 1;
  expect(sum && log <= 11, `a Huffman tree of depth ${log}`);
  const rest = 2 ** log - sum;
  expect((rest & (rest - 1)) === 0, "weights of a Huffman tree that leave no last weight");
  weights.push(highest(rest) + 1);
  expect(weights.length <= 256, "a Huffman tree of too many symbols");
  const [symbols, lengths] = [new Uint8Array(1 << log), new Uint8Array(1 << log)];
  let next = 0;
  for (let weight = 1; weight <= log; weight++)
    for (const [symbol, value] of weights.entries()) {
      if (value !== weight) continue;
      symbols.fill(symbol, next, next + (1 << (weight - 1)));
      lengths.fill(log + 1 - weight, next, (next += 1 << (weight - 1)));
    }
  return { log, symbols, lengths };
}

function readHuffman(cursor, { log, symbols, lengths }, out) {
  const bits = new BackwardBits(cursor);
  for (let i = 0; i < out.length; i++) {
    const code = bits.peek(log);
    out[i] = symbols[code];
    bits.left -= lengths[code];
  }
  expect(bits.left === 0, "literals that take other bits than their stream has");
}
// By whether literals are coded, and by format: the bytes of their head, and the bits of each size in it.
const HEAD_BYTES = [Uint8Array.of(1, 2, 1, 3), Uint8Array.of(3, 3, 4, 5)];
const SIZE_BITS = [Uint8Array.of(5, 12, 5, 20), Uint8Array.of(10, 10, 14, 18)];
// The state of one frame, which blocks pass on to later blocks.
class Frame {
  constructor(size, maxBlock) {
    Object.assign(this, { out: new Uint8Array(size), length: 0, maxBlock, tree: null });
    this.tables = [null, null, null];
    this.offsets = [1, 4, 8];
  }
  // Makes room for more bytes and returns their offset.
  room(count) {
    const { out, length } = this;
    this.length += count;
    if (this.length > out.length) badPayload("container-24", `blocks make more than ${out.length} bytes`);
    return length;
  }
  append(bytes) {
    this.out.set(bytes, this.room(bytes.length));
  }
  block(cursor) {
    const start = this.length;
    const literals = this.literals(cursor);
    let count = cursor.number(1);
    if (count === 255) count = cursor.number(2) + 0x7f00;
    else if (count >= 128) count = ((count - 128) << 8) + cursor.number(1);
    const taken = count ? this.sequences(cursor, count, literals) : 0;
    expect(count || cursor.left === 0, "bytes after a block without sequences");
    this.append(literals.subarray(taken));
    expect(this.length - start <= this.maxBlock, "a block of too many bytes");
  }
  literals(cursor) {
    const head = cursor.number(1);
    const [type, format] = [head & 3, (head >> 2) & 3];
    const bits = SIZE_BITS[type >> 1][format];
    const number = head + 256 * cursor.number(HEAD_BYTES[type >> 1][format] - 1);
    const count = Math.floor(number / (bits === 5 ? 8 : 16)) % 2 ** bits;
    expect(count <= this.maxBlock, "too many literals");
    if (type === 0) return cursor.take(count);
    if (type === 1) return new Uint8Array(count).fill(cursor.number(1));
    const own = cursor.part(Math.floor(number / 2 ** (4 + bits)) % 2 ** bits);
    if (type === 2) this.tree = readTree(own);
    expect(this.tree, "literals by the tree of a block that has none");
    const literals = new Uint8Array(count);
    const sizes = range(format ? 3 : 0, () => own.number(2));
    const each = format ? (count + 3) >> 2 : count;
    expect(sizes.length * each <= count, "four streams that are too short");
    for (const [i, size] of sizes.entries())
      readHuffman(own.part(size), this.tree, literals.subarray(each * i, each * (i + 1)));
    readHuffman(own, this.tree, literals.subarray(each * sizes.length));
    return literals;
  }
  readTables(cursor) {
    const modes = cursor.number(1);
    expect((modes & 3) === 0, "reserved modes of sequences");
    for (const [i, { maxLog, maxSymbol, usual }] of KINDS.entries()) {
      const mode = (modes >> (6 - 2 * i)) & 3;
      const symbol = mode === 1 ? cursor.number(1) : 0;
      expect(symbol <= maxSymbol, "a code that is out of range");
      if (mode === 0) this.tables[i] = usual;
      if (mode === 1) this.tables[i] = { log: 0, symbols: [symbol], bits: [0], bases: [0] };
      if (mode === 2) this.tables[i] = readTable(cursor, maxLog, maxSymbol);
      expect(this.tables[i], "the tables of a block that has none");
    }
    return this.tables;
  }
  // Appends the output of the sequences. Returns how many literals they use.
  sequences(cursor, count, literals) {
    const [lengths, offsets, matches] = this.readTables(cursor);
    const bits = new BackwardBits(cursor);
    let [length, offset, match] = [lengths, offsets, matches].map(({ log }) => bits.read(log));
    let taken = 0;
    for (let i = 0; i < count; i++) {
      const distance = number(bits, 1, offsets.symbols[offset]);
      const matched = number(bits, 2, matches.symbols[match]);
      const literal = number(bits, 0, lengths.symbols[length]);
      if (i < count - 1) {
        length = bits.next(lengths, length);
        match = bits.next(matches, match);
        offset = bits.next(offsets, offset);
      }
      expect(bits.left >= 0, "sequences that are cut short");
      expect(literal <= literals.length - taken, "sequences that take more literals than there are");
      this.append(literals.subarray(taken, taken + literal));
      this.copy(matched, this.repeated(distance, literal));
      taken += literal;
    }
    expect(bits.left === 0, "bytes after the last sequence");
    return taken;
  }
  // The distance of a match; the values 1 to 3 stand for earlier ones.
  repeated(value, literal) {
    const { offsets } = this;
    const index = value > 3 ? 3 : value - (literal ? 1 : 0);
    const distance = value > 3 ? value - 3 : index === 3 ? offsets[0] - 1 : offsets[index];
    expect(distance, "a distance of 0");
    if (index > 1) offsets[2] = offsets[1];
    if (index > 0) offsets[1] = offsets[0];
    return (offsets[0] = distance);
  }
  copy(count, distance) {
    const { out } = this;
    const at = this.room(count);
    expect(distance <= at, "a match from before the content");
    if (distance >= count) out.copyWithin(at, at - distance, at - distance + count);
    else for (let to = at; to < at + count; to++) out[to] = out[to - distance];
  }
}
// The `size` bytes of the only frame in `bytes`; `checked`: the file has the feature zstd-checksum.
export function decompress(bytes, size, checked) {
  limit(size, MAX_RATIO * bytes.length, `content of a zstd frame of ${bytes.length} bytes`);
  const cursor = new Cursor(bytes, () => malformed("it is cut short"));
  expect(cursor.number(4) === 0xfd2fb528, "another magic number");
  const head = cursor.number(1);
  const single = (head >> 5) & 1;
  expect((head & 8) === 0, "a reserved bit");
  const descriptor = single ? 0 : cursor.number(1);
  const dictionary = cursor.number([0, 1, 2, 4][head & 3]);
  must(dictionary === 0, "container-25", `a zstd frame needs the dictionary ${dictionary}`);
  const sizeBytes = [single, 2, 4, 8][head >> 6];
  must(sizeBytes, "container-22", "a zstd frame does not give its content size");
  const content = cursor.big(sizeBytes) + (sizeBytes === 2 ? 256n : 0n);
  must(content === BigInt(size), "container-23", `a zstd frame has ${content} bytes, its tensor ${size}`);
  const window = single ? size : 2 ** (10 + (descriptor >> 3)) * (1 + (descriptor & 7) / 8);
  must(window <= MAX_WINDOW, "container-26", `a zstd window of ${window} bytes is above ${MAX_WINDOW}`);
  must(!checked || head & 4, "container-65", "a zstd frame has no content checksum");
  const frame = new Frame(size, Math.min(window, MAX_BLOCK));
  for (let last = 0; !last;) last = readBlock(cursor, frame);
  must(frame.length === size, "container-24", `blocks make ${frame.length} bytes of ${size}`);
  const right = !(head & 4) || cursor.big(4) === (xxh64(frame.out) & 0xffffffffn);
  must(right, "container-33", "the content of a zstd frame does not have its checksum");
  expect(cursor.left === 0, "bytes after it");
  return frame.out;
}
// Reads the next block. Returns whether it is the last one.
function readBlock(cursor, frame) {
  const head = cursor.number(3);
  const [type, size] = [(head >> 1) & 3, head >> 3];
  expect(type < 3, "a block of a reserved type");
  const content = cursor.part(type === 1 ? 1 : size);
  expect(size <= frame.maxBlock, "a block of too many bytes");
  if (type === 2) frame.block(content);
  else frame.append(type ? new Uint8Array(size).fill(content.number(1)) : content.take(size));
  return head & 1;
}
