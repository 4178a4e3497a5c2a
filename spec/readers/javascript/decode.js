// Decoding of streams to values: the part that all codecs share, and sidecars (side-cars.md, Decode).
import { DECODERS, addRows } from "./codecs.js";
import { badPayload, missingBasis, must, need } from "./errors.js";
import { finite, floats, hex, isZero, range, view } from "./numbers.js";
import { LOG_NORMS } from "./parameters.js";
import { Rotation } from "./rotation.js";

const f32 = Math.fround;
// The streams of a side in memory. `bases`: Map from a digest in hexadecimal to a Basis.
class SideData {
  constructor(side, bytes, bases) {
    Object.assign(this, { side, bytes, bases, missing: null });
    this.streams = new Map(side.streams.map((stream) => [stream.stream, stream]));
  }
  u8 = (name) => this.bytes.get(name);
  u16 = (name) => view(this.bytes.get(name), Uint16Array);
  floats = (name) => floats(this.bytes.get(name), this.streams.get(name).dtype);
  finite = (name) => finite(this.bytes.get(name), this.streams.get(name).dtype, name);
  // Returns the number of entries in a stream of items.
  entries = (name) => this.streams.get(name).shape[2];
  // Norms of tokens, which may have 8 bits.
  norms(name) {
    if (this.streams.get(name).dtype !== "U8") return this.finite(name);
    return Float32Array.from(this.u8(name), (code) => LOG_NORMS[code]);
  }
  // The digits of a row of code streams, stream after stream, once unpack(row) has put them there.
  symbols(packings) {
    const planes = packings.map(({ name, planes }) => planes.map((_, plane) => this.u16(`${name}.${plane}`)));
    const unpack = (row) => packings.forEach((columns, i) => columns.unpack(planes[i], row));
    return { unpack, digits: packings.flatMap((columns) => columns.digits) };
  }
  // Returns the basis with a digest. Without it, decoding is refused after all other checks.
  basis(digest, rule) {
    const basis = this.bases.get(hex(digest));
    if (!basis) this.missing ??= [rule, `the basis ${hex(digest)} was not given`];
    return basis;
  }
}
// The binary32 values [batch, head, token, channel] of a range of packed tokens and the tail.
export function decodeSide(side, bytes, bases, range) {
  const data = new SideData(side, bytes, bases);
  const { codec, dim } = side;
  const { unpack, digits } = data.symbols(codec.packings);
  data.digits = digits;
  const decoder = DECODERS[codec.id](data, codec);
  const steps = sidecarSteps(data, codec);
  const { batch, heads, tokens } = range;
  const [sequences, width, count] = [batch, heads, tokens].map(([from, to]) => to - from);
  const out = new Float32Array(sequences * width * count * dim);
  const place = (b, h, t) => (((b - batch[0]) * width + h - heads[0]) * count + t - tokens[0]) * dim;
  const values = new Float64Array(dim);
  const decodeToken = (row, b, h, t) => {
    [row.b, row.h, row.t] = [b, h, t];
    const head = b * side.heads + h;
    row.token = head * side.packed + t;
    row.ofRun = head * side.runs.length + row.run;
    row.inRun = t - row.start;
    row.group = row.firstGroup + Math.floor(row.inRun / codec.group);
    row.ofGroup = head * side.groups + row.group;
    unpack(row.token);
    decoder(row, values);
    for (const step of steps) step(values, row);
    if (!data.missing) out.set(values, place(b, h, t));
  };
  for (const { from, to, row } of out.length ? blocks(side, tokens) : [])
    for (let b = batch[0]; b < batch[1]; b++)
      for (let h = heads[0]; h < heads[1]; h++) for (let t = from; t < to; t++) decodeToken(row, b, h, t);
  if (data.missing) missingBasis(...data.missing);
  if (side.tail) copyTail(data, out, place, range);
  return out;
}
// The packed tokens of a range in blocks, which do not cross runs or token groups, each with its place.
function* blocks({ runs, codec }, [first, last]) {
  const size = codec.group > 1 ? codec.group : 256;
  let [start, firstGroup] = [0, 0];
  for (const [run, length] of runs.entries()) {
    const row = { run, start, firstGroup };
    const end = Math.min(start + length, last);
    for (let from = Math.max(start, first); from < end;) {
      const to = Math.min(start + (Math.floor((from - start) / size) + 1) * size, end);
      yield { from, to, row };
      from = to;
    }
    start += length;
    firstGroup += Math.ceil(length / codec.group);
  }
}

function copyTail(data, out, place, { batch, heads, tokens }) {
  const { side } = data;
  const from = Math.max(tokens[0], side.packed);
  if (from >= tokens[1]) return;
  const tail = data.floats("tail");
  for (let b = batch[0]; b < batch[1]; b++)
    for (let h = heads[0]; h < heads[1]; h++) {
      const at = ((b * side.heads + h) * side.tail + from - side.packed) * side.dim;
      out.set(tail.subarray(at, at + (tokens[1] - from) * side.dim), place(b, h, from));
    }
}
// Sidecars and rotations, in the order of their checks: functions that change the values of a row.
const STEPS = {
  channel_scale(data) {
    const scales = data.finite("channel_scale");
    if (!scales.every((scale) => scale > 0)) badPayload("side-cars-6", "a channel scale is not above 0");
    return (u, { ofRun }) => {
      for (let c = 0, at = ofRun * u.length; c < u.length; c++) u[c] = f32(f32(u[c]) * scales[at + c]);
    };
  },
  channel_order(data) {
    const order = data.floats("channel_order");
    const { dim } = data.side;
    const seen = new Int32Array(dim).fill(-1);
    order.forEach((channel, at) => {
      const row = Math.floor(at / dim);
      if (channel >= dim || seen[channel] === row)
        badPayload("side-cars-8", `row ${row} of channel_order does not name each channel once`);
      seen[channel] = row;
    });
    const copy = new Float64Array(dim);
    return (u, { ofRun }) => {
      copy.set(u);
      for (let i = 0; i < dim; i++) u[order[ofRun * dim + i]] = copy[i];
    };
  },
  key_mean(data, { bits }) {
    const [codes, scales] = [data.u8("key_mean"), data.finite("key_mean_scale")];
    const { dim } = data.side;
    const half = dim / 2;
    return (u, { ofGroup: page }) => {
      const at = (page * dim * bits) / 8;
      for (let c = 0; c < dim; c++) {
        const byte = codes[at + (bits === 8 || c < half ? c : c - half)];
        const code = bits === 8 ? byte - 128 : (c < half ? byte & 15 : byte >> 4) - 8;
        u[c] = f32(u[c] + code * scales[page]);
      }
    };
  },
  outliers(data, { packing }) {
    const { unpack, digits } = data.symbols([packing]);
    const [flags] = digits;
    const values = data.finite("outliers");
    const { batch, heads, packed } = data.side;
    const starts = new Uint32Array(packed ? batch * heads * packed : 0);
    let count = 0;
    for (let t = 0; t < packed; t++)
      for (let row = t; row < starts.length; row += packed) {
        starts[row] = count;
        unpack(row);
        for (let c = 0; c < packing.n; c++) count += flags[c];
      }
    checkCount("flags of outliers", count, values.length / 4);
    return (u, { token }) => {
      unpack(token);
      let entry = 4 * starts[token];
      for (let c = 0; c < packing.n; c++)
        if (flags[c]) for (let i = 0; i < 4; i++) u[4 * c + i] = values[entry++];
    };
  },
  qjl(data, { packing, seed }) {
    const { unpack, digits } = data.symbols([packing]);
    const [signs] = digits;
    const norms = data.finite("qjl_norm");
    const { dim } = data.side;
    const rotation = new Rotation(dim, "signed-hadamard", seed);
    const correction = new Float64Array(dim);
    return (u, { token }) => {
      unpack(token);
      for (let i = 0; i < dim; i++) correction[i] = signs[i] ? -1 : 1;
      rotation.invert(correction);
      const gamma = norms[token] * Math.sqrt(Math.PI / (2 * dim));
      for (let c = 0; c < dim; c++) u[c] = f32(u[c] + gamma * correction[c]);
    };
  },
  raw_tokens(data) {
    const { batch, packed } = data.side;
    const flags = data.u8("raw_token_flags");
    const entries = new Map();
    for (let t = 0; t < packed; t++)
      for (let b = 0; b < batch; b++) {
        const flag = flags[b * packed + t];
        if (flag > 1) badPayload("side-cars-7", `a raw token flag is ${flag}`);
        if (flag) entries.set(t * batch + b, entries.size);
      }
    checkCount("flags of raw tokens", entries.size, data.entries("raw_tokens"));
    return putRaw(data, "raw_tokens", entries);
  },
  raw_positions: (data) => putRaw(data, "raw_values", rawPositions(data)),
  balanced(data, { basis: digest, layer, frame }) {
    const { heads, dim } = data.side;
    const basis = data.basis(digest, "side-cars-16");
    if (!basis) return null;
    const state = basis.state(layer, `k.${frame}`);
    need(state, "side-cars-17", `the basis has no k.${frame} of layer ${layer}`);
    const [, h, n] = state.shape;
    need(h === heads && n === dim, "side-cars-18", `k.${frame} is for ${h} heads of ${n} channels`);
    const starts = Int32Array.from(range(dim, (j) => j * dim));
    const factors = new Float64Array(dim);
    return (u, row) => {
      for (let j = 0; j < dim; j++) factors[j] = f32(u[j]);
      u.fill(0);
      addRows(u, state.values, row.h * dim * dim, starts, factors, dim);
    };
  },
  rotation_kind({ side: { codec } }, kind) {
    const rotation = kind !== "none" && new Rotation(codec.dim, kind, codec.rotation_seed ?? codec.seed);
    return rotation && ((u) => rotation.invert(u));
  },
  block_rotation(data, order) {
    const rotation = new Rotation(order, "hadamard", 0);
    return (u) => {
      for (let c = 0; c < u.length; c++) u[c] = f32(u[c]);
      for (let at = 0; at < u.length; at += order) rotation.invert(u, at);
    };
  },
};
const ORDER = ["outliers", "key_mean", "qjl", "rotation_kind", "block_rotation", "channel_order"];
ORDER.push("channel_scale", "balanced", "raw_tokens", "raw_positions");

function sidecarSteps(data, codec) {
  const made = {};
  for (const [name, make] of Object.entries(STEPS)) if (codec[name]) made[name] = make(data, codec[name]);
  // Without its basis, a side has no values, and only the packed signs of qjl remain to be checked.
  return (data.missing ? ["qjl"] : ORDER).map((name) => made[name]).filter(Boolean);
}
const checkCount = (what, count, entries) =>
  must(count === entries, "side-cars-5", `${count} ${what} are 1, and there are ${entries} entries`);
// Put the raw values of the tokens in `entries`: a Map from token · batch + sequence to an entry.
function putRaw(data, name, entries) {
  const { batch, heads, dim } = data.side;
  const values = data.floats(name);
  return (u, { b, h, t }) => {
    const entry = entries.get(t * batch + b);
    if (entry === undefined) return;
    const at = (entry * heads + h) * dim;
    u.set(values.subarray(at, at + dim));
  };
}

function rawPositions(data) {
  const { batch, packed } = data.side;
  const [words, bytes] = [data.u16("raw_positions"), data.u8("raw_values")];
  const [count, entries] = [data.entries("raw_positions"), data.entries("raw_values")];
  must(count === entries, "side-cars-12", `${count} raw positions and ${entries} entries of raw_values`);
  const positions = new Map();
  const entryBytes = count ? bytes.length / count : 0;
  let last = -1;
  for (let i = 0; i < count; i++) {
    const token = words[4 * i] + words[4 * i + 1] * 65536 + words[4 * i + 2] * 2 ** 32 - 1;
    const sequence = words[4 * i + 3];
    const place = token * batch + sequence;
    const unused = token < 0 && !sequence && isZero(bytes.subarray(i * entryBytes, (i + 1) * entryBytes));
    if (!unused && !(token >= 0 && token < packed && sequence < batch && place > last))
      badPayload("side-cars-13", `the token ${token} of sequence ${sequence} is not in its place`);
    last = unused ? Infinity : place;
    if (!unused) positions.set(place, i);
  }
  return positions;
}
