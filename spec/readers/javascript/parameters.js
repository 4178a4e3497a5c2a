// Parameters of codecs and sidecars, and the streams that follow from them (codecs/*.md, side-cars.md).
import { need, quoted, unknownCodec } from "./errors.js";
import { floats, floatOfBits, isInteger, range } from "./numbers.js";
import { Columns, defaultRowBytes } from "./packing.js";
import { hasHadamard } from "./rotation.js";
import { isMap, isText, mapOf, readMap, schema, typeOf } from "./schema.js";

// After the id of a codec come its parameters with their types; one that ends in ? may be absent. Brackets
// have the rule that sidecars break, and those that it allows. Each line below is a stream, present if what
// follows ? is so: a parameter that is true, equal or unequal to a word. A stream of numbers has a dtype;
// `all` heads, `one` or items; a row for each token, group or run; and the sizes of a row. One of symbols has
// = and then how many a row has, the base of each digit, and the sizes of alphabets after /. Words name
// parameters, those of DERIVED too; 2^x is a power of two, and quotients are rounded up.
const CODECS = tables(`
raw [side-cars-1]: dim dtype:bf16|fp16|fp32
  values dtype all token dim
lossless [lossless-5]: dim dtype:bf16|fp16 chunk:16|32|64|128|256 fields
  signed_fractions = dim 2^signedBits
  frequencies u16 all run 2^exponentBits
  states u16 all group 64
  word_counts u16 all group
  words u16 item
group: dim bits:1..8 axis:token|channel size:4|8|16|32|64|128 rotation_kind seed \\
    token_scale:none|fp16|fp32|fp16-per-head|fp32-per-head fields scale_dtype?
  codes = dim 2^bits
  scales scales all group dim 2 ? axis=token
  scales scales all token dim/size 2 ? axis=channel
  scale_range fp16 all run 4 ? scale_dtype
  token_scale factor all token ? perHead
  token_scale factor one token ? shared
minifloat: dim element:e4m3|e5m2|e2m1 granularity:tensor|head|token|block \\
    scale_dtype:fp32|fp16|e8m0|e4m3 fields
  codes = dim 2^elementBits
  block_scales u8 all token dim/width ? granularity=block
  global_scale fp32 one run ? scale_dtype=e4m3
  scale scale_dtype one run ? granularity=tensor
  scale scale_dtype all run ? granularity=head
  scale scale_dtype all token ? granularity=token
scalar: dim:2..1024 bits:1..8 bits_high:0..8 high_channels:bytes norm:norms rotation_kind seed \\
    magnitude_table:bytes high_magnitude_table:bytes fields
  codes = lowCount 2^bits
  codes_high = highCount 2^bits_high ? bits_high
  norm norm all token
octahedral: dim:4..1024 b_dir:1..8 b_norm:0..8 arrangement:dense|direct norm:norms rotation_kind seed \\
    direction_table:bytes norm_table:bytes fields
  index = dim/3 2^indexBits ? hasIndex
  sign = dim/3 2^signBits ? arrangement=dense
  symbol = padded 2^allBits ? joined
  symbol = padded 2^indexBits 2^signBits ? apart
  norm norm all token
quaternion: dim secondary:1..4096 radius_bits:1..8 arrangement:dense|direct norm:half rotation_kind seed \\
    rotation_seed:seed fields
  symbol = dim/4 above 2^radius_bits / words 2^radius_bits ? arrangement=direct
  codeword = dim/4 words ? whole
  codeword_low = dim/4 low ? low
  codeword_high = dim/4 high ? low
  radius = dim/4 2^radius_bits ? arrangement=dense
  scale norm all token
angle: dim:even bins:2..65536 norm:fp32|linear|log norm_bits:0..8 arrangement:dense|direct range:half \\
    rotation_kind seed fields
  symbol = dim/2 above 2^norm_bits / bins 2^norm_bits ? arrangement=direct
  angle = dim/2 above / bins ? rounded
  angle = dim/2 bins ? whole
  angle_low = dim/2 low ? low
  angle_high = dim/2 high ? low
  norm_codes = dim/2 2^norm_bits ? coded
  norm fp32 all token dim/2 ? norm=fp32
  range range all token 2 ? norm!=fp32
polar: dim:even bits:levels norm:half rotation_kind seed angle_table:bytes fields
  radius norm all token radii
trellis: dim bits:1..4 state_bits:8|10 norm:norms rotation_kind seed table:bytes
  codes.0 u16 all token words
  norm norm all token
klt [klt-4 raw_positions]: dim basis:digest layer:0..4095 side:k|v rows:basis|fp16|fp32 widths:bytes \\
    gain:none|fp16 fields
  codes u8 one token rowBytes ? shortRuns
  gain gain all token ? gain!=none
  rows rows all run vectors dim ? rows!=basis
transform [transform-4 raw_positions]: dim basis:digest layer:0..4095 side:k|v scope:head|layer step:0..255 \\
    chunk:16|32|64|128|256
  positions u16 one group 2 ? side=k
  tokens u16 one group
  columns u16 all group
  states u16 all group 64
  word_counts u16 all group 2
  words u16 item
opaque [row-8]: dim
  bytes u8 all token dim`);
// In the same form, but a sidecar has one value or a map. Here x.fields is F of its stream of symbols.
const SIDECARS = tables(`
balanced: basis:digest layer:0..4095 frame:balanced|centered
channel_scale: half
  channel_scale channel_scale all run dim
channel_order: u8|u16
  channel_order channel_order all run dim
block_rotation: 2..1024
key_mean: tokens:8|16|32|64|128|256|512|1024 bits:4|8
  key_mean u8 all group meanBytes
  key_mean_scale fp16 all group
outliers: fields:integer
  outlier_flags = dim/4 2
  outliers fp16 item 4
qjl: seed norm:half fields:integer
  qjl_signs = dim 2
  qjl_norm qjlNorm all token
raw_tokens: bf16|fp16|fp32
  raw_token_flags u8 one token
  raw_tokens raw_tokens item heads dim
raw_positions: bf16|fp16|fp32
  raw_positions u16 item 4
  raw_values raw_positions item heads dim`);

function tables(text) {
  const result = {};
  let last = null;
  for (const line of text
    .trim()
    .replace(/\\\n */g, "")
    .split("\n")) {
    const [, id, few, words, optional] = /^(\w+)(?: \[(.*)\])?: (.*?)(?: (\w+)\?)?$/.exec(line) ?? [];
    if (id) last = result[id] = { words, few: few?.split(" "), optional, streams: [] };
    else last.streams.push(line.trim());
  }
  return result;
}
export const isCodec = (id) => Object.hasOwn(CODECS, id);
const DTYPES = { bf16: "BF16", fp16: "F16", fp32: "F32", log8: "U8", u8: "U8", u16: "U16" };
export const dtypeOf = (p, word) => DTYPES[word] ?? DTYPES[p[word]];
// The streams of lines: { name, dtype, heads, rows, sizes }, "heads" being a size, too. Streams of symbols
// are those of their planes; their packings by `fields`, a Map from their names, go to `packings`.
function streamsOf(p, lines, packings, fields) {
  const factor = (word) => (word.startsWith("2^") ? 2 ** p[word.slice(2)] : (p[word] ?? Number(word)));
  const number = (word) => {
    const [one, divisor = 1] = word.split("/").map(factor);
    return Math.ceil(one / divisor);
  };
  const isSo = (_, word, sign, other) => (sign ? (p[word] === other) === (sign === "=") : p[word]);
  return lines.flatMap((line) => {
    const [what, flag] = line.split(" ? ");
    if (flag && !isSo(...flag.split(/(\w+)(!?=)?(.*)/))) return [];
    const [name, dtype, ...words] = what.split(" ");
    if (dtype !== "=") {
      const [heads, rows, ...sizes] = words[0] === "item" ? ["item", ...words] : words;
      const size = (word) => (word === "heads" ? word : number(word));
      return [{ name, dtype: dtypeOf(p, dtype), heads, rows, sizes: sizes.map(size) }];
    }
    const [bases, alphabets = bases] = words.slice(1).join(" ").split(" / ");
    const numbers = [bases, alphabets].map((text) => text.split(" ").map(number));
    const packing = new Columns(name, number(words[0]), ...numbers, fields.get(name));
    packings.push(packing);
    const plane = { dtype: "U16", heads: "all", rows: "token" };
    return packing.planes.map((count, i) => ({ ...plane, name: `${name}.${i}`, sizes: [count] }));
  });
}
const checkSize = (bytes, size, rule) =>
  need(bytes.length === size, rule, `${bytes.length} bytes of a parameter, and ${size} are needed`);
// The values of a table of `count` numbers, which have to ascend from 0 or above to at most `most`.
function readTable(bytes, count, most, sizeRule, rule = sizeRule) {
  checkSize(bytes, 4 * count, sizeRule);
  const values = floats(bytes, "F32");
  const ascends = values.every((x, i) => x >= 0 && x <= most && (i === 0 || x > values[i - 1]));
  need(ascends, rule, `a table does not ascend from 0 or above to at most ${most}`);
  return values;
}
// Symbols below x as one stream or, if `isSplit` of the bytes says so, as two: x = low · high, high odd.
function splitSymbols(p, n, x, isSplit) {
  const low = x & -x;
  const two = low > 1 && low < x ? defaultRowBytes(n, low) + defaultRowBytes(n, x / low) : Infinity;
  const split = isSplit(defaultRowBytes(n, x), two);
  Object.assign(p, { low: split ? low : 0, high: x / low, whole: !split, above: powerAbove(x) });
}
const powerAbove = (x) => 2 ** Math.ceil(Math.log2(x));
const checkRotation = (order) => need(hasHadamard(order), "front-7", `no rotation has the order ${order}`);
// The largest binary32 that is not above π / 2.
const RIGHT_ANGLE = floatOfBits(0x3fc90fda);
// The vectors of a head of a basis: N(dim) of basis.md.
export const vectorCount = (dim) => 2 + dim + Math.ceil((510 * Math.ceil(dim / 16)) / dim);
// For each codec and sidecar: check what the tables leave, and add to its parameters what streams and
// decoders need. It may return lines of streams that come before those of the table.
const DERIVED = {
  lossless(p) {
    need(p.chunk * p.dim <= 65536, "lossless-4", `chunk · dim is ${p.chunk * p.dim}, above 65536`);
    const fraction = p.dtype === "bf16" ? 7 : 10;
    Object.assign(p, { group: p.chunk, fraction, signedBits: fraction + 1, exponentBits: 15 - fraction });
  },
  group(p) {
    const { axis, size, token_scale: factor, scale_dtype: dtype } = p;
    need(dtype === undefined || dtype === "u8", "group-4", `scale_dtype is ${quoted(dtype)}`);
    const perHead = factor.endsWith("-per-head");
    const shared = factor !== "none" && !perHead;
    const group = axis === "token" ? size : 1;
    Object.assign(p, { scales: dtype ?? "fp16", perHead, shared, factor: factor.slice(0, 4), group });
  },
  minifloat(p) {
    const { element, granularity, scale_dtype: dtype } = p;
    p.width = { e8m0: 32, e4m3: 16 }[dtype];
    const fits = (granularity === "block") === Boolean(p.width);
    need(fits, "minifloat-2", `scale_dtype ${dtype} is not one of granularity ${granularity}`);
    need(dtype !== "e4m3" || element === "e2m1", "minifloat-4", `e4m3 scales of the element ${element}`);
    p.elementBits = element === "e2m1" ? 4 : 8;
  },
  scalar(p) {
    const { dim, bits, bits_high: high, high_channels: flags } = p;
    need(high === 0 || high > bits, "scalar-2", `bits_high is ${high}, not above bits, ${bits}`);
    checkSize(flags, high ? Math.ceil(dim / 8) : 0, "scalar-2");
    const counts = [2 ** (bits - 1), high && 2 ** (high - 1)];
    const all = [p.magnitude_table, p.high_magnitude_table];
    p.magnitudes = all.map((bytes, i) => readTable(bytes, counts[i], 1, "scalar-2", "scalar-4"));
    p.isHigh = range(dim, (c) => (flags[c >> 3] >> (c & 7)) & 1);
    p.highCount = p.isHigh.filter(Boolean).length;
    p.lowCount = dim - p.highCount;
    need(high === 0 || (p.highCount > 0 && p.lowCount > 0), "scalar-5", `${p.highCount} channels are high`);
    need(dim % 8 === 0 || !(flags.at(-1) >> (dim % 8)), "scalar-6", "high_channels has a bit from dim on");
  },
  octahedral(p) {
    const [m, n, dense] = [2 * (p.b_dir - 1), p.b_norm, p.arrangement === "dense"];
    p.directions = readTable(p.direction_table, 2 ** (m / 2), 1, "octahedral-2", "octahedral-4");
    p.lengths = readTable(p.norm_table, 2 ** n, 1, "octahedral-2", "octahedral-4");
    const normInIndex = [1, 2, 4, 8, 16].includes(m + n);
    const [indexBits, signBits] = normInIndex ? [m + n, 2] : [m, 2 + n];
    Object.assign(p, {
      normInIndex,
      indexBits,
      signBits,
      allBits: m + n + 2,
      hasIndex: dense && indexBits > 0,
    });
    const apart = !dense && p.allBits > 8 && indexBits > 0;
    Object.assign(p, { apart, joined: !dense && !apart, padded: 24 * Math.ceil(p.dim / 72) });
  },
  quaternion(p) {
    const direct = p.arrangement === "direct";
    need(!direct || p.secondary <= 2730, "quaternion-2", `secondary is ${p.secondary}, above 2730 of direct`);
    p.words = 24 * p.secondary;
    const isSplit = (one, two) => !direct && (p.words > 65536 || two < one);
    splitSymbols(p, Math.ceil(p.dim / 4), p.words, isSplit);
    p.whole &&= !direct;
  },
  angle(p) {
    const { dim, bins, norm, norm_bits: bits, arrangement } = p;
    const [plain, direct] = [norm === "fp32", arrangement === "direct"];
    need(plain === (bits === 0), "angle-2", `norm_bits is ${bits} for the norm ${norm}`);
    const fits = !plain || (!direct && p.range === "fp16");
    need(fits, "angle-2", "the norm fp32 has another arrangement than dense, or another range than fp16");
    const rounded = defaultRowBytes(dim / 2, powerAbove(bins));
    const isSplit = (one, two) => !direct && rounded > Math.min(one, two) && two <= one;
    splitSymbols(p, dim / 2, bins, isSplit);
    p.rounded = p.whole && !direct && rounded <= defaultRowBytes(dim / 2, bins);
    p.whole &&= !direct && !p.rounded;
    p.coded = !plain && !direct;
  },
  polar(p) {
    const digits = p.bits.split(".");
    need(digits.length <= Math.ceil(Math.log2(p.dim)), "polar-2", `${digits.length} levels for dim ${p.dim}`);
    const streams = [];
    let offset = 0;
    p.radii = p.dim;
    // Of each level: its pairs, where the tables of equal and other ones begin, and its code stream.
    p.levels = digits.map((digit, i) => {
      const [size, pairs, odd] = [2 ** digit, p.radii >> 1, p.radii & 1];
      const equal = pairs * 2 ** (i + 1) > p.dim ? pairs - 1 : pairs;
      const tables = [equal, pairs - equal].map((count) => {
        if (i === 0 || count === 0) return offset;
        const bytes = p.angle_table.subarray(4 * offset, 4 * (offset + size));
        readTable(bytes, size, RIGHT_ANGLE, "polar-4");
        return (offset += size) - size;
      });
      if (digits[i - 1] !== digit) streams.push({ name: `angles${i + 1}`, n: 0, size });
      const from = streams.at(-1).n;
      streams.at(-1).n += pairs;
      p.radii -= pairs;
      return { pairs, odd, equal, tables, stream: streams.length - 1, from };
    });
    checkSize(p.angle_table, 4 * offset, "polar-4");
    p.anglesOfFirst = 2 ** digits[0];
    return streams.map(({ name, n, size }) => `${name} = ${n} ${size}`);
  },
  trellis(p) {
    need((p.dim * p.bits) % 16 === 0, "trellis-3", `dim · bits is ${p.dim * p.bits}, no multiple of 16`);
    checkSize(p.table, 2 * 2 ** p.state_bits, "trellis-4");
    Object.assign(p, { values: floats(p.table, "F16"), words: (p.dim * p.bits) / 16 });
    need(!p.values.some((x) => !(Math.abs(x) <= 1)), "trellis-4", "table has a value outside [-1, 1]");
  },
  klt(p) {
    const { dim, widths, fields } = p;
    p.ofHeads = fields.size === 1 && fields.has("codes");
    const size = p.ofHeads ? 8 : 16;
    const runs = Math.ceil(dim / size);
    p.heads = p.ofHeads ? widths.length / runs : 1;
    const whole = p.heads >= 1 && Number.isInteger(p.heads) && widths.length === p.heads * runs;
    need(whole, "klt-2", `widths has ${widths.length} bytes for runs of ${runs}`);
    const some = widths.every((width) => width <= 8) && widths.some((width) => width > 0);
    need(some, "klt-2", "widths has a byte above 8, or no byte above 0");
    need(!p.ofHeads || fields.get("codes") === 8, "klt-2", "fields of the stream codes is not 8");
    p.vectors = vectorCount(dim);
    if (p.ofHeads) {
      // The codes of a head in 8 columns, run after run, by where they begin in a row of bytes.
      p.rowBytes = 0;
      p.shortRuns = Array.from(widths, (width, i) => {
        const [head, first, byte] = [Math.floor(i / runs), 8 * (i % runs), p.rowBytes];
        const count = Math.min(8, dim - first);
        p.rowBytes += Math.ceil((count * width) / 8);
        return { head, first, width, count, byte };
      });
      return [];
    }
    const ofWidth = (width) => range(dim, (c) => c).filter((c) => widths[c >> 4] === width);
    p.columns = range(8, (i) => ({ width: i + 1, list: ofWidth(i + 1) })).filter(({ list }) => list.length);
    return p.columns.map(({ width, list }) => `codes_${width} = ${list.length} ${2 ** width}`);
  },
  transform(p) {
    need(p.chunk * p.dim <= 65536, "transform-3", `chunk · dim is ${p.chunk * p.dim}, above 65536`);
    p.group = p.chunk;
  },
  channel_order: ({ dim, channel_order: dtype }) =>
    need(dtype === "u16" || dim <= 256, "side-cars-3", `channel_order is u8 at dim ${dim}`),
  block_rotation({ dim, block_rotation: size }) {
    need(dim % size === 0, "side-cars-3", `block_rotation is ${size}, which does not divide dim ${dim}`);
    checkRotation(size);
  },
  key_mean(p) {
    const { tokens, bits } = p.key_mean;
    need(bits === 8 || p.dim % 2 === 0, "side-cars-3", `key_mean of 4 bits at the odd dim ${p.dim}`);
    need(p.group === 1, "side-cars-15", `key_mean with the codec ${p.id} of token group ${p.group}`);
    Object.assign(p, { group: tokens, meanBytes: (p.dim * bits) / 8 });
  },
  outliers: ({ dim }) => need(dim % 4 === 0, "side-cars-4", `outliers at dim ${dim}, no multiple of 4`),
  qjl(p) {
    checkRotation(p.dim);
    p.qjlNorm = p.qjl.norm;
  },
};
// Check a codec's map of the header. Returns its parameters with `packings` and `streams`.
export function readCodec(map, isKnown) {
  const id = map.get("id");
  need(isText(id), "container-11", "an entry of codecs has no string for the key id");
  if (!isKnown(id)) unknownCodec("container-12", `the codec ${quoted(id)} is not known`);
  const { words, optional, streams, few } = CODECS[id];
  const types = { id: isText, ...schema(words) };
  const rule = (number) => (id === "opaque" ? "row-8" : `${id}-${number}`);
  const entries = [...map];
  const own = new Map(entries.splice(0, Object.keys(types).length));
  const p = readMap(own, types, `codec ${id}`, rule(1), rule(2));
  if (optional && entries[0]?.[0] === optional) p[optional] = entries.shift()[1];
  for (const [name] of entries) {
    need(Object.hasOwn(SIDECARS, name), rule(1), `codec ${id} has the key ${quoted(name)}`);
    need(!few || few.includes(name), few?.[0], `codec ${id} has the sidecar ${name}`);
  }
  Object.assign(p, { group: 1, packings: [] });
  const first = DERIVED[id]?.(p) ?? [];
  if (p.rotation_kind && p.rotation_kind !== "none") checkRotation(p.dim);
  p.streams = streamsOf(p, [...first, ...streams], p.packings, p.fields);
  if (p.fields) checkFields(p, rule);
  readSidecars(p, entries);
  return p;
}

function checkFields({ id, fields, packings, ofHeads }, rule) {
  const names = ofHeads ? ["codes"] : packings.map(({ name }) => name);
  const same = [...fields.keys()].join() === names.join();
  need(same, rule(3), `codec ${id}: fields has the keys ${quoted([...fields.keys()])}, not ${names}`);
  need([...fields.values()].every(isInteger), rule(2), `codec ${id}: fields has a value of another type`);
}
// Check sidecars, [key, value] each, and add their streams; one of symbols has a `packing`.
function readSidecars(p, sidecars) {
  const order = Object.keys(SIDECARS);
  let last = -1;
  for (const [key, value] of sidecars) {
    need(order.indexOf(key) > last, "side-cars-2", `the sidecar ${key} is not in its place`);
    last = order.indexOf(key);
    const { words } = SIDECARS[key];
    const type = words.includes(":") ? mapOf(words, "side-cars-3") : typeOf(words);
    need(type(value, key), "side-cars-3", `the sidecar ${key} is not one of its table`);
    p[key] = isMap(value) ? Object.fromEntries(value) : value;
  }
  for (const [key] of sidecars) {
    DERIVED[key]?.(p);
    const packings = [];
    const fields = { get: () => p[key].fields };
    p.streams.push(...streamsOf(p, SIDECARS[key].streams, packings, fields));
    if (packings.length) [p[key].packing] = packings;
  }
}
// The value of a norm of 8 bits (README.md), for all 256 bytes.
const logNorm = (c) => Math.fround(2 ** ((c % 16) / 16)) * 2 ** (Math.floor(c / 16) - 7);
export const LOG_NORMS = Float32Array.from(range(256, (c) => (c === 0 ? 0 : logNorm(c - 1))));
