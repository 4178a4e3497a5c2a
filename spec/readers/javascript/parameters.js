// Parameters of codecs and side-cars, and the streams that follow from them (codecs/*.md, side-cars.md).

import { badHeader, unknownCodec } from "./errors.js";
import { floats, floatOfBits, isInteger } from "./numbers.js";
import { Columns, defaultRowBytes } from "./packing.js";
import { hasHadamard } from "./rotation.js";

const integer = (least, most) => (value) => isInteger(value) && value >= least && value <= most;
const oneOf =
  (...values) =>
  (value) =>
    values.includes(value);
const isBytes = (value) => value instanceof Uint8Array;
const isMap = (value) => value instanceof Map;
const dimension = integer(1, 1024);
const evenDimension = (value) => integer(2, 1024)(value) && value % 2 === 0;
const seed = integer(0, 2n ** 64n - 1n);
const digest = (value) => isBytes(value) && value.length === 32;
const halfOrFull = oneOf("fp16", "fp32");

// Types by name; a parameter without a type has that of its own name.
const TYPES = {
  dim: dimension,
  even: evenDimension,
  fields: isMap,
  bytes: isBytes,
  half: halfOrFull,
  levels: (value) => typeof value === "string" && /^[1-8](\.[1-8])*$/.test(value),
  seed,
  rotation_kind: oneOf("none", "hadamard", "signed-hadamard"),
  norms: oneOf("fp16", "fp32", "log8"),
  digest,
};

// The parameters of a codec, from words such as dim, bits:1..8, axis:token|channel and chunk:16|32.
function table(text) {
  return text.split(/\s+/).map((word) => {
    const [name, type = name] = word.split(":");
    if (Object.hasOwn(TYPES, type)) return [name, TYPES[type]];
    if (type.includes("..")) return [name, integer(...type.split("..").map(Number))];
    const texts = type.split("|");
    const numbers = texts.map(Number);
    return [name, oneOf(...(numbers.some(Number.isNaN) ? texts : numbers))];
  });
}

export const DTYPES = { bf16: "BF16", fp16: "F16", fp32: "F32", log8: "U8", u8: "U8", u16: "U16" };
const powerAbove = (x) => 2 ** Math.ceil(Math.log2(x));

// The streams of x = low · high in two parts, low a power of two and high odd, and the bytes of their rows.
function twoParts(name, n, x) {
  const low = x & -x;
  const high = x / low;
  const streams = [
    [`${name}_low`, n, [low]],
    [`${name}_high`, n, [high]],
  ];
  const bytes = low > 1 && high > 1 ? defaultRowBytes(n, low) + defaultRowBytes(n, high) : Infinity;
  return { low, streams, bytes };
}

function ascends(bytes, most, rule) {
  const values = floats(bytes, "F32");
  for (let i = 0; i < values.length; i++)
    if (!(values[i] >= 0 && values[i] <= most && (i === 0 || values[i] > values[i - 1])))
      badHeader(rule, `a table does not ascend from 0 or above to at most ${most}, at entry ${i}`);
}

// The columns of each code stream of klt, in the order of its symbols.
function columnsByWidth({ dim, widths }) {
  const channels = Array.from({ length: dim }, (_, c) => c);
  return [1, 2, 3, 4, 5, 6, 7, 8]
    .map((width) => ({ width, list: channels.filter((c) => widths[c >> 4] === width) }))
    .filter(({ list }) => list.length);
}

// The codes of klt in a row of bytes, run after run: { head, first, width, count, bit }; sets p.rowBytes.
function shortRuns(p) {
  let bit = 0;
  const result = Array.from(p.widths, (width, i) => {
    const first = 8 * (i % p.runs);
    const run = { head: Math.floor(i / p.runs), first, width, count: Math.min(8, p.dim - first), bit };
    bit += 8 * Math.ceil((run.count * width) / 8);
    return run;
  });
  p.rowBytes = bit / 8;
  return result;
}

// The largest binary32 that is not above π / 2.
const RIGHT_ANGLE = floatOfBits(0x3fc90fda);

// The levels of polar: bits, counts of pairs and of radii, and the offset of the table of each kind of pair.
function polarLevels(p) {
  const levels = [];
  let radii = p.dim;
  let offset = 0;
  p.bits.split(".").forEach((digit, i) => {
    const level = { bits: Number(digit), pairs: radii >> 1, odd: radii % 2 === 1 };
    const size = 2 ** i;
    const last = p.dim - (radii - 1) * size;
    const unequal = !level.odd && last < size;
    level.equal = level.pairs - (unequal ? 1 : 0);
    if (i > 0) {
      level.table = offset;
      if (level.equal) offset += 2 ** level.bits;
      level.unequalTable = offset;
      if (unequal) offset += 2 ** level.bits;
    }
    const before = levels.at(-1);
    // The code stream of the level, and where its symbols begin there.
    const shared = before?.bits === level.bits;
    level.stream = before ? before.stream + (shared ? 0 : 1) : 0;
    level.from = shared ? before.from + before.pairs : 0;
    levels.push(level);
    radii = Math.ceil(radii / 2);
  });
  return { levels, radii, entries: offset };
}

// Each codec has: parameters; check(p), for what the tables leave; codeStreams(p): [name, n, bases,
// alphabets]; group(p), its token group; streams(p): [name, dtype, heads, rows, ...sizes] after its code
// streams. `heads` is "all", "one" or "entry"; `rows` is "token", "group", "run" or "entry".
export const CODECS = {
  raw: {
    noSideCars: "side-cars-1",
    parameters: table("dim dtype:bf16|fp16|fp32"),
    streams: (p) => [["values", DTYPES[p.dtype], "all", "token", p.dim]],
  },

  lossless: {
    noSideCars: "lossless-5",
    parameters: table("dim dtype:bf16|fp16 chunk:16|32|64|128|256 fields"),
    check(p) {
      p.fraction = p.dtype === "bf16" ? 7 : 10;
      if (p.chunk * p.dim > 65536) badHeader("lossless-4", `chunk · dim is ${p.chunk * p.dim}, above 65536`);
    },
    codeStreams: (p) => [["signed_fractions", p.dim, [2 ** (p.fraction + 1)]]],
    group: (p) => p.chunk,
    streams: (p) => [
      ["frequencies", "U16", "all", "run", 2 ** (15 - p.fraction)],
      ["states", "U16", "all", "group", 64],
      ["word_counts", "U16", "all", "group"],
      ["words", "U16", "entry", "entry"],
    ],
  },

  group: {
    parameters: table(`dim bits:1..8 axis:token|channel size:4|8|16|32|64|128 rotation_kind seed
      token_scale:none|fp16|fp32|fp16-per-head|fp32-per-head fields`),
    optional: ["scale_dtype", oneOf("u8"), "group-4"],
    codeStreams: (p) => [["codes", p.dim, [2 ** p.bits]]],
    group: (p) => (p.axis === "token" ? p.size : 1),
    streams(p) {
      const dtype = p.scale_dtype ? "U8" : "F16";
      const result = [
        p.axis === "token"
          ? ["scales", dtype, "all", "group", p.dim, 2]
          : ["scales", dtype, "all", "token", Math.ceil(p.dim / p.size), 2],
      ];
      if (p.scale_dtype) result.push(["scale_range", "F16", "all", "run", 4]);
      if (p.token_scale !== "none") {
        const heads = p.token_scale.endsWith("-per-head") ? "all" : "one";
        result.push(["token_scale", DTYPES[p.token_scale.slice(0, 4)], heads, "token"]);
      }
      return result;
    },
  },

  minifloat: {
    parameters: table(`dim element:e4m3|e5m2|e2m1 granularity:tensor|head|token|block
      scale_dtype:fp32|fp16|e8m0|e4m3 fields`),
    check(p) {
      if ((p.granularity === "block") !== ["e8m0", "e4m3"].includes(p.scale_dtype))
        badHeader("minifloat-2", `scale_dtype ${p.scale_dtype} is not one of granularity ${p.granularity}`);
      if (p.scale_dtype === "e4m3" && p.element !== "e2m1")
        badHeader("minifloat-4", `scale_dtype e4m3 has the element ${p.element}, not e2m1`);
    },
    codeStreams: (p) => [["codes", p.dim, [p.element === "e2m1" ? 16 : 256]]],
    streams(p) {
      if (p.scale_dtype === "e8m0") return [["block_scales", "U8", "all", "token", Math.ceil(p.dim / 32)]];
      if (p.scale_dtype === "e4m3")
        return [
          ["block_scales", "U8", "all", "token", Math.ceil(p.dim / 16)],
          ["global_scale", "F32", "one", "run"],
        ];
      const heads = p.granularity === "tensor" ? "one" : "all";
      return [["scale", DTYPES[p.scale_dtype], heads, p.granularity === "token" ? "token" : "run"]];
    },
  },

  scalar: {
    parameters: table(`dim:2..1024 bits:1..8 bits_high:0..8 high_channels:bytes norm:norms
      rotation_kind seed magnitude_table:bytes high_magnitude_table:bytes fields`),
    check(p) {
      const high = p.bits_high;
      if (high && high <= p.bits) badHeader("scalar-2", `bits_high is ${high}, not above bits, ${p.bits}`);
      const sizes = [
        [p.high_channels, high ? Math.ceil(p.dim / 8) : 0],
        [p.magnitude_table, 4 * 2 ** (p.bits - 1)],
        [p.high_magnitude_table, high ? 4 * 2 ** (high - 1) : 0],
      ];
      for (const [bytes, size] of sizes)
        if (bytes.length !== size) badHeader("scalar-2", `${bytes.length} bytes of a parameter, not ${size}`);
      for (const table of [p.magnitude_table, p.high_magnitude_table]) ascends(table, 1, "scalar-4");
      p.isHigh = Array.from(
        { length: p.dim },
        (_, c) => high > 0 && ((p.high_channels[c >> 3] >> (c & 7)) & 1) === 1,
      );
      p.highCount = p.isHigh.filter(Boolean).length;
      if (high && (p.highCount === 0 || p.highCount === p.dim))
        badHeader("scalar-5", `high_channels has ${p.highCount} of ${p.dim} channels`);
      if (high && p.dim % 8 && p.high_channels[p.high_channels.length - 1] >> (p.dim % 8))
        badHeader("scalar-6", "high_channels has a bit from dim on");
    },
    codeStreams(p) {
      const result = [["codes", p.dim - p.highCount, [2 ** p.bits]]];
      if (p.bits_high) result.push(["codes_high", p.highCount, [2 ** p.bits_high]]);
      return result;
    },
    streams: (p) => [["norm", DTYPES[p.norm], "all", "token"]],
  },

  octahedral: {
    parameters: table(`dim:4..1024 b_dir:1..8 b_norm:0..8 arrangement:dense|direct norm:norms
      rotation_kind seed direction_table:bytes norm_table:bytes fields`),
    check(p) {
      for (const [bytes, bits] of [
        [p.direction_table, p.b_dir - 1],
        [p.norm_table, p.b_norm],
      ])
        if (bytes.length !== 4 * 2 ** bits)
          badHeader("octahedral-2", `a table has ${bytes.length} bytes, not ${4 * 2 ** bits}`);
      ascends(p.direction_table, 1, "octahedral-4");
      ascends(p.norm_table, 1, "octahedral-4");
      const m = 2 * (p.b_dir - 1);
      p.normInIndex = [1, 2, 4, 8, 16].includes(m + p.b_norm);
      p.indexBits = p.normInIndex ? m + p.b_norm : m;
      p.signBits = p.normInIndex ? 2 : 2 + p.b_norm;
      p.twoDigits = p.indexBits + p.signBits > 8 && p.indexBits > 0;
      p.triplets = Math.ceil(p.dim / 3);
    },
    codeStreams(p) {
      const [index, sign] = [2 ** p.indexBits, 2 ** p.signBits];
      if (p.arrangement === "direct")
        return [["symbol", 24 * Math.ceil(p.triplets / 24), p.twoDigits ? [index, sign] : [index * sign]]];
      const result = [["sign", p.triplets, [sign]]];
      return p.indexBits ? [["index", p.triplets, [index]], ...result] : result;
    },
    streams: (p) => [["norm", DTYPES[p.norm], "all", "token"]],
  },

  quaternion: {
    parameters: table(`dim secondary:1..4096 radius_bits:1..8 arrangement:dense|direct norm:half
      rotation_kind seed rotation_seed:seed fields`),
    check(p) {
      if (p.arrangement === "direct" && p.secondary > 2730)
        badHeader("quaternion-2", `secondary is ${p.secondary}, above 2730 of the arrangement direct`);
      p.words = 24 * p.secondary;
      p.chunks = Math.ceil(p.dim / 4);
    },
    codeStreams(p) {
      const n = p.chunks;
      const radius = 2 ** p.radius_bits;
      if (p.arrangement === "direct")
        return [["symbol", n, [powerAbove(p.words), radius], [p.words, radius]]];
      const parts = twoParts("codeword", n, p.words);
      const isSplit = p.words > 65536 || parts.bytes < defaultRowBytes(n, p.words);
      p.low = isSplit ? parts.low : 0;
      return [...(isSplit ? parts.streams : [["codeword", n, [p.words]]]), ["radius", n, [radius]]];
    },
    streams: (p) => [["scale", DTYPES[p.norm], "all", "token"]],
  },

  angle: {
    parameters: table(`dim:even bins:2..65536 norm:fp32|linear|log norm_bits:0..8
      arrangement:dense|direct range:half rotation_kind seed fields`),
    check(p) {
      const plain = p.norm === "fp32";
      if (plain !== (p.norm_bits === 0))
        badHeader("angle-2", `norm_bits is ${p.norm_bits} for the norm ${p.norm}`);
      if (plain && (p.arrangement !== "dense" || p.range !== "fp16"))
        badHeader("angle-2", "the norm fp32 has another arrangement than dense, or another range than fp16");
    },
    codeStreams(p) {
      const n = p.dim / 2;
      const above = powerAbove(p.bins);
      const codes = 2 ** p.norm_bits;
      if (p.arrangement === "direct") return [["symbol", n, [above, codes], [p.bins, codes]]];
      const parts = twoParts("angle", n, p.bins);
      const rounded = defaultRowBytes(n, above);
      const exact = defaultRowBytes(n, p.bins);
      const isRounded = rounded <= parts.bytes && rounded <= exact;
      const isSplit = !isRounded && parts.bytes <= exact;
      p.low = isSplit ? parts.low : 0;
      const result = isSplit
        ? parts.streams
        : [["angle", n, ...(isRounded ? [[above], [p.bins]] : [[p.bins]])]];
      return p.norm === "fp32" ? result : [...result, ["norm_codes", n, [codes]]];
    },
    streams: (p) =>
      p.norm === "fp32"
        ? [["norm", "F32", "all", "token", p.dim / 2]]
        : [["range", DTYPES[p.range], "all", "token", 2]],
  },

  polar: {
    parameters: table("dim:even bits:levels norm:half rotation_kind seed angle_table:bytes fields"),
    check(p) {
      const count = (p.bits.length + 1) / 2;
      if (count > Math.ceil(Math.log2(p.dim)))
        badHeader("polar-2", `bits has ${count} levels, too many for dim ${p.dim}`);
      Object.assign(p, polarLevels(p));
      if (p.angle_table.length !== 4 * p.entries)
        badHeader("polar-4", `angle_table has ${p.angle_table.length} bytes, not ${4 * p.entries}`);
      for (const level of p.levels.slice(1)) {
        const end = (start) => p.angle_table.subarray(4 * start, 4 * (start + 2 ** level.bits));
        if (level.equal) ascends(end(level.table), RIGHT_ANGLE, "polar-4");
        if (level.equal < level.pairs) ascends(end(level.unequalTable), RIGHT_ANGLE, "polar-4");
      }
    },
    codeStreams(p) {
      const result = [];
      p.levels.forEach(({ stream, from, pairs, bits }, i) => {
        result[stream] ??= [`angles${i + 1}`, 0, [2 ** bits]];
        result[stream][1] = from + pairs;
      });
      return result;
    },
    streams: (p) => [["radius", DTYPES[p.norm], "all", "token", p.radii]],
  },

  trellis: {
    parameters: table("dim bits:1..4 state_bits:8|10 norm:norms rotation_kind seed table:bytes"),
    check(p) {
      if ((p.dim * p.bits) % 16)
        badHeader("trellis-3", `dim · bits is ${p.dim * p.bits}, not a multiple of 16`);
      if (p.table.length !== 2 * 2 ** p.state_bits)
        badHeader("trellis-4", `table has ${p.table.length} bytes, not ${2 * 2 ** p.state_bits}`);
      p.values = floats(p.table, "F16");
      if (!p.values.every((value) => Math.abs(value) <= 1))
        badHeader("trellis-4", "table has a value outside [-1, 1]");
    },
    streams: (p) => [
      ["codes.0", "U16", "all", "token", (p.dim * p.bits) / 16],
      ["norm", DTYPES[p.norm], "all", "token"],
    ],
  },

  klt: {
    noSideCars: "klt-4",
    sideCars: ["raw_positions"],
    parameters: table(`dim basis:digest layer:0..4095 side:k|v rows:basis|fp16|fp32 widths:bytes
      gain:none|fp16 fields`),
    check(p) {
      p.ofHeads = p.fields.size === 1 && p.fields.has("codes");
      const runs = Math.ceil(p.dim / (p.ofHeads ? 8 : 16));
      const { length } = p.widths;
      if (p.ofHeads ? length === 0 || length % runs : length !== runs)
        badHeader("klt-2", `widths has ${length} bytes for runs of ${runs}`);
      if (p.widths.some((width) => width > 8) || p.widths.every((width) => width === 0))
        badHeader("klt-2", "widths has a byte above 8, or no byte above 0");
      p.runs = runs;
      p.heads = p.ofHeads ? length / runs : 0;
      p.rowCount = 2 + p.dim + Math.ceil((510 * Math.ceil(p.dim / 16)) / p.dim);
      if (p.ofHeads) p.shortRuns = shortRuns(p);
      else p.columns = columnsByWidth(p);
    },
    codeStreams(p) {
      return (p.columns ?? []).map(({ width, list }) => [`codes_${width}`, list.length, [2 ** width]]);
    },
    streams(p) {
      const result = p.ofHeads ? [["codes", "U8", "one", "token", p.rowBytes]] : [];
      if (p.gain === "fp16") result.push(["gain", "F16", "all", "token"]);
      if (p.rows !== "basis") result.push(["rows", DTYPES[p.rows], "all", "run", p.rowCount, p.dim]);
      return result;
    },
  },

  transform: {
    noSideCars: "transform-4",
    sideCars: ["raw_positions"],
    parameters: table(`dim basis:digest layer:0..4095 side:k|v scope:head|layer step:0..255
      chunk:16|32|64|128|256`),
    check(p) {
      if (p.chunk * p.dim > 65536) badHeader("transform-3", `chunk · dim is ${p.chunk * p.dim}, above 65536`);
    },
    group: (p) => p.chunk,
    streams(p) {
      const positions = p.side === "k" ? [["positions", "U16", "one", "group", 2]] : [];
      return [
        ...positions,
        ["tokens", "U16", "one", "group"],
        ["columns", "U16", "all", "group"],
        ["states", "U16", "all", "group", 64],
        ["word_counts", "U16", "all", "group", 2],
        ["words", "U16", "entry", "entry"],
      ];
    },
  },

  // Of rows only (row.md).
  opaque: {
    noSideCars: "row-8",
    rule: "row-8",
    parameters: table("dim"),
    streams: (p) => [["bytes", "U8", "all", "token", p.dim]],
  },
};

const mapOf = (keys) => (value) =>
  isMap(value) &&
  [...value.keys()].join() === Object.keys(keys).join() &&
  Object.entries(keys).every(([key, check]) => check(value.get(key)));

const SIDE_CARS = {
  balanced: mapOf({ basis: digest, layer: integer(0, 4095), frame: oneOf("balanced", "centered") }),
  channel_scale: halfOrFull,
  channel_order: oneOf("u8", "u16"),
  block_rotation: integer(2, 1024),
  key_mean: mapOf({ tokens: oneOf(8, 16, 32, 64, 128, 256, 512, 1024), bits: oneOf(4, 8) }),
  outliers: mapOf({ fields: isInteger }),
  qjl: mapOf({ seed, norm: halfOrFull, fields: isInteger }),
  raw_tokens: oneOf("bf16", "fp16", "fp32"),
  raw_positions: oneOf("bf16", "fp16", "fp32"),
};

const planeStreams = ({ name, planes }) =>
  planes.map((words, plane) => [`${name}.${plane}`, "U16", "all", "token", words]);

function sideCarStreams(p) {
  const of = {
    channel_scale: (dtype) => [["channel_scale", DTYPES[dtype], "all", "run", p.dim]],
    channel_order: (dtype) => [["channel_order", DTYPES[dtype], "all", "run", p.dim]],
    key_mean: ({ bits }) => [
      ["key_mean", "U8", "all", "group", bits === 8 ? p.dim : p.dim / 2],
      ["key_mean_scale", "F16", "all", "group"],
    ],
    outliers: ({ packing }) => [...planeStreams(packing), ["outliers", "F16", "entry", "entry", 4]],
    qjl: ({ packing, norm }) => [...planeStreams(packing), ["qjl_norm", DTYPES[norm], "all", "token"]],
    raw_tokens: (dtype) => [
      ["raw_token_flags", "U8", "one", "token"],
      ["raw_tokens", DTYPES[dtype], "entry", "entry", "heads", p.dim],
    ],
    raw_positions: (dtype) => [
      ["raw_positions", "U16", "entry", "entry", 4],
      ["raw_values", DTYPES[dtype], "entry", "entry", "heads", p.dim],
    ],
  };
  return Object.entries(of).flatMap(([name, streams]) => (p[name] ? streams(p[name]) : []));
}

function checkSideCars(p, sideCars) {
  const order = Object.keys(SIDE_CARS);
  let last = -1;
  for (const [key, value] of sideCars) {
    const place = order.indexOf(key);
    if (place <= last) badHeader("side-cars-2", `the side-car ${key} is not in its place`);
    last = place;
    if (!SIDE_CARS[key](value))
      badHeader("side-cars-3", `the side-car ${key} has a value that is not one of its table`);
    p[key] = isMap(value) ? Object.fromEntries(value) : value;
  }
  if (p.channel_order === "u8" && p.dim > 256)
    badHeader("side-cars-3", `channel_order is u8 at dim ${p.dim}`);
  if (p.block_rotation && p.dim % p.block_rotation)
    badHeader("side-cars-3", `block_rotation is ${p.block_rotation}, which does not divide dim ${p.dim}`);
  if (p.block_rotation && !hasHadamard(p.block_rotation))
    badHeader("front-7", `there is no rotation of order ${p.block_rotation}`);
  if (p.key_mean?.bits === 4 && p.dim % 2)
    badHeader("side-cars-3", `key_mean of 4 bits at the odd dim ${p.dim}`);
  if (p.key_mean && p.group !== 1)
    badHeader("side-cars-15", `key_mean with the codec ${p.id} of token group ${p.group}`);
  if (p.key_mean) p.group = p.key_mean.tokens;
  if (p.outliers) {
    if (p.dim % 4) badHeader("side-cars-4", `outliers at dim ${p.dim}, which is not a multiple of 4`);
    p.outliers.packing = new Columns("outlier_flags", p.dim / 4, [2], p.outliers.fields);
  }
  if (p.qjl) {
    if (!hasHadamard(p.dim)) badHeader("front-7", `qjl: there is no rotation of order ${p.dim}`);
    p.qjl.packing = new Columns("qjl_signs", p.dim, [2], p.qjl.fields);
  }
}

// Check a codec's map of the header. Returns its parameters with `packings` and `streams`.
export function readCodec(map, allowed) {
  const id = map.get("id");
  if (typeof id !== "string") badHeader("container-11", "an entry of codecs has no string for the key id");
  const codec = Object.hasOwn(CODECS, id) && allowed(id) ? CODECS[id] : null;
  if (!codec) unknownCodec("container-12", `the codec ${JSON.stringify(id)} is not known`);
  const rule = (number) => codec.rule ?? `${id}-${number}`;
  const keys = [...map.keys()];
  const names = ["id", ...codec.parameters.map(([name]) => name)];
  names.forEach((name, i) => {
    if (keys[i] !== name)
      badHeader(rule(1), `codec ${id}: key ${i} is ${JSON.stringify(keys[i])}, not ${name}`);
  });
  const p = { id };
  const set = (name, check, broken = rule(2)) => {
    p[name] = map.get(name);
    if (!check(p[name])) badHeader(broken, `codec ${id}: ${name} has a value that is not one of its table`);
  };
  for (const [name, check] of codec.parameters) set(name, check);
  const optional = Boolean(codec.optional) && codec.optional[0] === keys[names.length];
  if (optional) set(...codec.optional);
  const sideCars = keys.slice(names.length + (optional ? 1 : 0)).map((key) => [key, map.get(key)]);
  for (const [key] of sideCars) {
    if (!Object.hasOwn(SIDE_CARS, key)) badHeader(rule(1), `codec ${id} has the key ${JSON.stringify(key)}`);
    if (codec.noSideCars && !codec.sideCars?.includes(key))
      badHeader(codec.noSideCars, `codec ${id} has the side-car ${key}`);
  }
  codec.check?.(p);
  p.group = codec.group?.(p) ?? 1;
  if (p.rotation_kind && p.rotation_kind !== "none" && !hasHadamard(p.dim))
    badHeader("front-7", `there is no rotation of order ${p.dim}`);
  readFields(p, codec, id);
  checkSideCars(p, sideCars);
  p.streams = [...p.packings.flatMap(planeStreams), ...codec.streams(p), ...sideCarStreams(p)];
  return p;
}

function readFields(p, codec, id) {
  const streams = codec.codeStreams?.(p) ?? [];
  if (!p.fields) {
    p.packings = [];
    return;
  }
  const names = id === "klt" && p.ofHeads ? ["codes"] : streams.map(([name]) => name);
  if ([...p.fields.keys()].join() !== names.join())
    badHeader(`${id}-3`, `codec ${id}: fields has the keys ${[...p.fields.keys()]}, not ${names}`);
  for (const value of p.fields.values())
    if (!isInteger(value)) badHeader(`${id}-2`, `codec ${id}: fields has a value that is not an integer`);
  if (p.ofHeads && p.fields.get("codes") !== 8) badHeader("klt-2", "fields of the stream codes is not 8");
  p.packings = streams.map(
    ([name, n, bases, alphabets]) => new Columns(name, n, bases, p.fields.get(name), alphabets),
  );
}

// The value of a norm of 8 bits (README.md), for all 256 bytes.
const STEPS = [
  0x3f800000, 0x3f85aac3, 0x3f8b95c2, 0x3f91c3d3, 0x3f9837f0, 0x3f9ef532, 0x3fa5fed7, 0x3fad583f, 0x3fb504f3,
  0x3fbd08a4, 0x3fc5672a, 0x3fce248c, 0x3fd744fd, 0x3fe0ccdf, 0x3feac0c7, 0x3ff5257d,
].map(floatOfBits);
export const LOG_NORMS = Float32Array.from({ length: 256 }, (_, c) =>
  c === 0 ? 0 : STEPS[(c - 1) % 16] * 2 ** (Math.floor((c - 1) / 16) - 7),
);
