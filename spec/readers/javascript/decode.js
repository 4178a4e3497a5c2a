// From streams to values: the frame of all codecs, and side-cars (side-cars.md, Decode).

import { badHeader, badPayload, missingBasis } from "./errors.js";
import { finite, floats, hex, isZero, view } from "./numbers.js";
import { LOG_NORMS } from "./parameters.js";
import { Rotation } from "./rotation.js";
import { DECODERS } from "./codecs.js";

const f32 = Math.fround;

// The streams of a side in memory. `bases`: Map from a digest in hexadecimal to a Basis.
class SideData {
  constructor(side, bytes, bases) {
    Object.assign(this, { side, codec: side.codec, bytes, bases });
    this.dtypes = new Map(side.streams.map((stream) => [stream.stream, stream.dtype]));
  }

  u8(name) {
    return this.bytes.get(name);
  }

  u16(name) {
    return view(this.bytes.get(name), Uint16Array);
  }

  planes(columns) {
    return columns.planes.map((_, plane) => this.u16(`${columns.name}.${plane}`));
  }

  // The count of entries of a stream that has a row for each.
  entries(name) {
    return this.side.streams.find(({ stream }) => stream === name).shape[2];
  }

  // A function from the number of a row of the code streams to its digits, stream after stream.
  unpacker() {
    const { packings } = this.codec;
    const planes = packings.map((columns) => this.planes(columns));
    if (packings.length === 1) return (row) => packings[0].unpack(planes[0], row);
    return (row) => packings.flatMap((columns, i) => columns.unpack(planes[i], row));
  }

  finite(name) {
    return finite(this.bytes.get(name), this.dtypes.get(name), name);
  }

  // Norms of tokens, which may have 8 bits.
  norms(name) {
    if (this.dtypes.get(name) !== "U8") return this.finite(name);
    return Float32Array.from(this.u8(name), (code) => LOG_NORMS[code]);
  }

  // The basis with a digest; what lacks it refuses to decode once all else is checked.
  basis(digest, rule) {
    const basis = this.bases.get(hex(digest));
    if (!basis) this.missing ??= [hex(digest), rule];
    return basis ?? null;
  }

  refuseMissing() {
    if (this.missing) missingBasis(this.missing[1], `the basis ${this.missing[0]} was not given`);
  }
}

// Decode the packed tokens and the tail. `range`: { batch: [from, to], heads, tokens }, the latter of packed
// ones and the tail together. Returns binary32 values [batch, head, token, channel] of the range.
export function decodeSide(side, bytes, bases, range) {
  const data = new SideData(side, bytes, bases);
  const { codec, dim } = side;
  const decoder = DECODERS[codec.id](data, codec, side);
  const steps = sideCarSteps(data);
  const { batch, heads, tokens } = range;
  const [sequences, width, count] = [batch, heads, tokens].map(([from, to]) => to - from);
  const out = new Float32Array(sequences * width * count * dim);
  const place = (b, h, t) => (((b - batch[0]) * width + h - heads[0]) * count + t - tokens[0]) * dim;
  const values = new Float64Array(dim);
  const row = {};
  const decodeToken = (b, h, t) => {
    row.h = h;
    row.t = t;
    row.head = b * side.heads + h;
    row.token = row.head * side.packed + t;
    row.ofRun = row.head * side.runs.length + row.run;
    row.inRun = t - row.start;
    row.group = row.firstGroup + Math.floor(row.inRun / codec.group);
    row.ofGroup = row.head * side.groups + row.group;
    decoder(row, values);
    for (const step of steps) step(values, row);
    if (!data.missing) out.set(values, place(b, h, t));
  };
  const step = codec.group > 1 ? codec.group : 256;
  if (out.length)
    eachBlock(side, tokens, step, (place, from, to) => {
      Object.assign(row, place);
      for (row.b = batch[0]; row.b < batch[1]; row.b++)
        for (let h = heads[0]; h < heads[1]; h++) for (let t = from; t < to; t++) decodeToken(row.b, h, t);
    });
  data.refuseMissing();
  if (side.tail) copyTail(data, out, place, range);
  return out;
}

// The tokens of a range in blocks of at most `step`, which do not cross runs or token groups.
function eachBlock(side, [first, last], step, visit) {
  let start = 0;
  let firstGroup = 0;
  side.runs.forEach((length, run) => {
    const end = Math.min(start + length, last);
    for (let from = Math.max(start, first); from < end;) {
      const to = Math.min(start + (Math.floor((from - start) / step) + 1) * step, end);
      visit({ run, start, firstGroup }, from, to);
      from = to;
    }
    start += length;
    firstGroup += Math.ceil(length / side.codec.group);
  });
}

function copyTail(data, out, place, { batch, heads, tokens }) {
  const { side } = data;
  const tail = floats(data.bytes.get("tail"), data.dtypes.get("tail"));
  const from = Math.max(tokens[0], side.packed);
  if (from >= tokens[1]) return;
  for (let b = batch[0]; b < batch[1]; b++)
    for (let h = heads[0]; h < heads[1]; h++) {
      const at = ((b * side.heads + h) * side.tail + from - side.packed) * side.dim;
      out.set(tail.subarray(at, at + (tokens[1] - from) * side.dim), place(b, h, from));
    }
}

// Side-cars and rotations, in the order of their checks: each takes the streams of a side and its parameter,
// and returns a function that changes the values of a row.
const STEPS = {
  channel_scale(data) {
    const scales = data.finite("channel_scale");
    if (scales.some((scale) => !(scale > 0))) badPayload("side-cars-6", "a channel scale is not above 0");
    return (u, { ofRun }) => u.forEach((x, c) => (u[c] = f32(f32(x) * scales[ofRun * u.length + c])));
  },

  channel_order(data, dtype) {
    const order = dtype === "u8" ? data.u8("channel_order") : data.u16("channel_order");
    const { dim } = data.side;
    const seen = new Int32Array(dim).fill(-1);
    order.forEach((channel, at) => {
      const row = Math.floor(at / dim);
      if (channel >= dim || seen[channel] === row)
        badPayload("side-cars-8", `row ${row} of channel_order does not name each channel once`);
      seen[channel] = row;
    });
    return (u, { ofRun }) => u.slice().forEach((x, i) => (u[order[ofRun * dim + i]] = x));
  },

  key_mean(data, { bits }) {
    const codes = data.u8("key_mean");
    const scales = data.finite("key_mean_scale");
    const half = data.side.dim / 2;
    const bytesOf = (page) => codes.subarray((page * codes.length) / scales.length);
    return (u, { ofGroup: page }) => {
      const bytes = bytesOf(page);
      for (let c = 0; c < u.length; c++) {
        const code = bits === 8 ? bytes[c] - 128 : (c < half ? bytes[c] & 15 : bytes[c - half] >> 4) - 8;
        u[c] = f32(u[c] + code * scales[page]);
      }
    };
  },

  outliers(data, { packing }) {
    const planes = data.planes(packing);
    const values = data.finite("outliers");
    const { batch, heads, packed } = data.side;
    const starts = new Uint32Array(packed ? batch * heads * packed : 0);
    let count = 0;
    for (let t = 0; t < packed; t++)
      for (let head = 0; head < batch * heads; head++) {
        const row = head * packed + t;
        starts[row] = count;
        const [flags] = packing.unpack(planes, row);
        for (let c = 0; c < packing.n; c++) count += flags[c];
      }
    checkCount("flags of outliers", count, values.length / 4);
    return (u, { token }) => {
      const [flags] = packing.unpack(planes, token);
      let entry = 4 * starts[token];
      for (let c = 0; c < packing.n; c++)
        if (flags[c]) for (let i = 0; i < 4; i++) u[4 * c + i] = values[entry++];
    };
  },

  qjl(data, { packing, seed }) {
    const planes = data.planes(packing);
    const norms = data.finite("qjl_norm");
    const { dim } = data.side;
    const rotation = new Rotation(dim, "signed-hadamard", seed);
    const correction = new Float64Array(dim);
    return (u, { token }) => {
      const [signs] = packing.unpack(planes, token);
      for (let i = 0; i < dim; i++) correction[i] = signs[i] ? -1 : 1;
      rotation.invert(correction);
      const gamma = norms[token] * Math.sqrt(Math.PI / (2 * dim));
      for (let c = 0; c < dim; c++) u[c] = f32(u[c] + gamma * correction[c]);
    };
  },

  raw_tokens(data) {
    const { side } = data;
    const flags = data.u8("raw_token_flags");
    const entries = new Map();
    for (let t = 0; t < side.packed; t++)
      for (let b = 0; b < side.batch; b++) {
        const flag = flags[b * side.packed + t];
        if (flag > 1) badPayload("side-cars-7", `a raw token flag is ${flag}`);
        if (flag) entries.set(t * side.batch + b, entries.size);
      }
    checkCount("flags of raw tokens", entries.size, data.entries("raw_tokens"));
    return putRaw(data, "raw_tokens", entries);
  },

  raw_positions: (data) => putRaw(data, "raw_values", rawPositions(data)),

  balanced(data, { basis: digest, layer, frame: name }) {
    const { heads, dim } = data.side;
    const basis = data.basis(digest, "side-cars-16");
    if (!basis) return null;
    const state = basis.state(layer, `k.${name}`);
    if (!state) badHeader("side-cars-17", `the basis has no k.${name} of layer ${layer}`);
    const [, ofHeads, channels] = state.shape;
    if (ofHeads !== heads || channels !== dim)
      badHeader("side-cars-18", `k.${name} of the basis is for ${ofHeads} heads of ${channels} channels`);
    const copy = new Float64Array(dim);
    return (u, { h }) => {
      copy.set(u);
      u.fill(0);
      for (let j = 0; j < dim; j++) {
        const x = f32(copy[j]);
        const at = (h * dim + j) * dim;
        for (let c = 0; c < dim; c++) u[c] += x * state.values[at + c];
      }
    };
  },

  rotation_kind({ codec }, kind) {
    if (kind === "none") return null;
    const rotation = new Rotation(codec.dim, kind, codec.rotation_seed ?? codec.seed);
    return (u) => rotation.invert(u);
  },

  block_rotation(data, order) {
    const rotation = new Rotation(order, "hadamard", 0);
    return (u) => {
      for (let c = 0; c < u.length; c++) u[c] = f32(u[c]);
      for (let at = 0; at < u.length; at += order) rotation.invert(u, at);
    };
  },
};

// The order in which they are applied.
const ORDER = [
  ...["outliers", "key_mean", "qjl", "rotation_kind", "block_rotation", "channel_order", "channel_scale"],
  ...["balanced", "raw_tokens", "raw_positions"],
];

function sideCarSteps(data) {
  const made = {};
  for (const [name, make] of Object.entries(STEPS))
    if (data.codec[name]) made[name] = make(data, data.codec[name]);
  // Without its basis a side has no values: only the packed signs of qjl are still to be checked.
  return (data.missing ? ["qjl"] : ORDER).map((name) => made[name]).filter(Boolean);
}

function checkCount(what, count, entries) {
  if (count !== entries)
    badPayload("side-cars-5", `${count} ${what} are 1, and there are ${entries} entries`);
}

// Put the raw values of the tokens in `entries`: a Map from token · batch + sequence to an entry.
function putRaw(data, name, entries) {
  const { batch, heads, dim } = data.side;
  const values = floats(data.u8(name), data.dtypes.get(name));
  return (u, { b, h, t }) => {
    const entry = entries.get(t * batch + b);
    if (entry === undefined) return;
    const at = (entry * heads + h) * dim;
    u.set(values.subarray(at, at + dim));
  };
}

function rawPositions(data) {
  const { batch, packed } = data.side;
  const words = data.u16("raw_positions");
  const bytes = data.u8("raw_values");
  const count = data.entries("raw_positions");
  if (count !== data.entries("raw_values"))
    badPayload(
      "side-cars-12",
      `${count} raw positions and ${data.entries("raw_values")} entries of raw_values`,
    );
  const positions = new Map();
  const entryBytes = count ? bytes.length / count : 0;
  let last = -1;
  for (let i = 0; i < count; i++) {
    const token = words[4 * i] + words[4 * i + 1] * 65536 + words[4 * i + 2] * 2 ** 32 - 1;
    const sequence = words[4 * i + 3];
    if (token < 0) {
      if (sequence || !isZero(bytes.subarray(i * entryBytes, (i + 1) * entryBytes)))
        badPayload("side-cars-13", `the unused position ${i} or its entry is not all zero`);
      last = Infinity;
      continue;
    }
    const place = token * batch + sequence;
    if (token >= packed || sequence >= batch || !(place > last))
      badPayload(
        "side-cars-13",
        `position ${i}, token ${token} of sequence ${sequence}, is absent or out of order`,
      );
    last = place;
    positions.set(place, i);
  }
  return positions;
}
