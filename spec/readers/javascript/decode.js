// From streams to values: the frame of all codecs, and side-cars (side-cars.md, Decode).

import { badHeader, badPayload, missingBasis } from "./errors.js";
import { finite, floats, hex, view } from "./numbers.js";
import { LOG_NORMS } from "./parameters.js";
import { Rotation } from "./rotation.js";
import { DECODERS } from "./codecs.js";

const f32 = Math.fround;

// The streams of a side in memory. `bases`: Map from a digest in hexadecimal to a Basis.
export class SideData {
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

  // A function from the number of a row of the code streams to its digits, stream after stream.
  unpacker() {
    const { packings } = this.codec;
    const planes = packings.map((columns) => this.planes(columns));
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
  const decoder = DECODERS[codec.id](data);
  const sideCars = new SideCars(data);
  const [batches, heads, tokens] = [range.batch, range.heads, range.tokens];
  const count = tokens[1] - tokens[0];
  const size = (batches[1] - batches[0]) * (heads[1] - heads[0]) * count * dim;
  const out = new Float32Array(size);
  const place = (b, h, t) =>
    (((b - batches[0]) * (heads[1] - heads[0]) + h - heads[0]) * count + t - tokens[0]) * dim;
  const values = new Float64Array(dim);
  const row = { run: 0, inRun: 0, group: 0 };
  const step = codec.group > 1 ? codec.group : 256;
  if (size > 0)
    eachBlock(side, tokens, step, (run, from, to, start, firstGroup) => {
      row.run = run;
      for (let b = batches[0]; b < batches[1]; b++)
        for (let h = heads[0]; h < heads[1]; h++)
          for (let t = from; t < to; t++) {
            row.inRun = t - start;
            row.group = firstGroup + Math.floor(row.inRun / codec.group);
            decoder(b, h, t, row, values);
            if (data.missing) sideCars.check(b, h, t);
            else sideCars.apply(b, h, t, row, values);
            if (!data.missing) out.set(values, place(b, h, t));
          }
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
      visit(run, from, to, start, firstGroup);
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

// The steps after a codec's own, and the checks of the streams of side-cars.
class SideCars {
  constructor(data) {
    this.data = data;
    this.side = data.side;
    this.dim = data.side.dim;
    const p = data.codec;
    this.rotation =
      p.rotation_kind && p.rotation_kind !== "none"
        ? new Rotation(this.dim, p.rotation_kind, p.rotation_seed ?? p.seed)
        : null;
    // Values before a rotation need more than binary32 only in the rotation itself.
    this.blocks = p.block_rotation ? new Rotation(p.block_rotation, "hadamard", 0) : null;
    if (p.channel_scale) this.#channelScale();
    if (p.channel_order) this.#channelOrder();
    if (p.key_mean) {
      this.meanCodes = data.u8("key_mean");
      this.meanScales = data.finite("key_mean_scale");
    }
    if (p.outliers) this.#outliers(p.outliers.packing);
    if (p.qjl) {
      this.signs = data.planes(p.qjl.packing);
      this.signNorms = data.finite("qjl_norm");
      this.signRotation = new Rotation(this.dim, "signed-hadamard", p.qjl.seed);
      this.correction = new Float64Array(this.dim);
    }
    if (p.raw_tokens) this.#rawTokens(p.raw_tokens);
    if (p.raw_positions) this.#rawPositions();
    if (p.balanced) this.#balanced(p.balanced);
    this.copy = new Float64Array(this.dim);
  }

  #channelScale() {
    this.scales = this.data.finite("channel_scale");
    if (this.scales.some((scale) => !(scale > 0)))
      badPayload("side-cars-6", "a channel scale is not above 0");
  }

  #channelOrder() {
    const order =
      this.data.codec.channel_order === "u8" ? this.data.u8("channel_order") : this.data.u16("channel_order");
    const { dim } = this;
    const seen = new Int32Array(dim).fill(-1);
    for (let at = 0; at < order.length; at++) {
      const row = Math.floor(at / dim);
      if (order[at] >= dim || seen[order[at]] === row)
        badPayload("side-cars-8", `row ${row} of channel_order does not name each channel once`);
      seen[order[at]] = row;
    }
    this.order = order;
  }

  #outliers(packing) {
    const { data, side } = this;
    const planes = (this.flagPlanes = data.planes(packing));
    this.outlierValues = data.finite("outliers");
    const { batch, heads, packed } = side;
    const starts = (this.outlierStarts = new Uint32Array(packed ? batch * heads * packed : 0));
    let count = 0;
    for (let t = 0; t < packed; t++)
      for (let b = 0; b < batch; b++)
        for (let h = 0; h < heads; h++) {
          const row = (b * heads + h) * packed + t;
          starts[row] = count;
          const [flags] = packing.unpack(planes, row);
          for (let c = 0; c < packing.n; c++) count += flags[c];
        }
    if (4 * count !== this.outlierValues.length)
      badPayload(
        "side-cars-5",
        `${count} flags of outliers are 1, and there are ${this.outlierValues.length / 4} entries`,
      );
  }

  #rawTokens(dtype) {
    const { data, side } = this;
    const flags = data.u8("raw_token_flags");
    this.rawEntries = new Map();
    for (let t = 0; t < side.packed; t++)
      for (let b = 0; b < side.batch; b++) {
        const flag = flags[b * side.packed + t];
        if (flag > 1) badPayload("side-cars-7", `a raw token flag is ${flag}`);
        if (flag) this.rawEntries.set(t * side.batch + b, this.rawEntries.size);
      }
    const entries = side.streams.find(({ stream }) => stream === "raw_tokens").shape[2];
    if (this.rawEntries.size !== entries)
      badPayload(
        "side-cars-5",
        `${this.rawEntries.size} flags of raw tokens are 1, and there are ${entries} entries`,
      );
    this.rawTokens = floats(data.bytes.get("raw_tokens"), data.dtypes.get("raw_tokens"));
  }

  #rawPositions() {
    const { data, side } = this;
    const words = data.u16("raw_positions");
    const bytes = data.bytes.get("raw_values");
    const [positions, values] = ["raw_positions", "raw_values"].map(
      (name) => side.streams.find(({ stream }) => stream === name).shape[2],
    );
    if (positions !== values)
      badPayload("side-cars-12", `${positions} raw positions and ${values} entries of raw_values`);
    this.positions = new Map();
    const entryBytes = positions ? bytes.length / positions : 0;
    let last = -1;
    for (let i = 0; i < positions; i++) {
      const token = words[4 * i] + words[4 * i + 1] * 65536 + words[4 * i + 2] * 2 ** 32 - 1;
      const sequence = words[4 * i + 3];
      if (token < 0) {
        const entry = bytes.subarray(i * entryBytes, (i + 1) * entryBytes);
        if (sequence || entry.some((byte) => byte))
          badPayload("side-cars-13", `the unused position ${i} or its entry is not all zero`);
        last = Infinity;
        continue;
      }
      const place = token * side.batch + sequence;
      if (token >= side.packed || sequence >= side.batch || !(place > last))
        badPayload(
          "side-cars-13",
          `position ${i} is token ${token} of sequence ${sequence}, which is not there or out of order`,
        );
      last = place;
      this.positions.set(place, i);
    }
    this.rawValues = floats(bytes, data.dtypes.get("raw_values"));
  }

  #balanced({ basis: digest, layer, frame }) {
    const basis = this.data.basis(digest, "side-cars-16");
    if (!basis) return;
    const state = basis.state(layer, `k.${frame}`);
    if (!state) badHeader("side-cars-17", `the basis has no k.${frame} of layer ${layer}`);
    if (state.shape[1] !== this.side.heads || state.shape[2] !== this.dim)
      badHeader(
        "side-cars-18",
        `k.${frame} of the basis is for ${state.shape[1]} heads of ${state.shape[2]} channels`,
      );
    this.frame = state.values;
  }

  // What apply() checks, where values cannot be decoded.
  check(b, h, t) {
    const { qjl } = this.data.codec;
    if (qjl) qjl.packing.unpack(this.signs, (b * this.side.heads + h) * this.side.packed + t);
  }

  apply(b, h, t, row, u) {
    const { dim, side, rotation } = this;
    const p = this.data.codec;
    const token = (b * side.heads + h) * side.packed + t;
    if (p.outliers) this.#putOutliers(p.outliers.packing, token, u);
    if (p.key_mean) this.#addMean(p.key_mean.bits, (b * side.heads + h) * side.groups + row.group, u);
    if (p.qjl) this.#addSigns(p.qjl.packing, token, u);
    if (rotation) rotation.invert(u);
    if (this.blocks) {
      if (rotation) for (let c = 0; c < dim; c++) u[c] = f32(u[c]);
      for (let at = 0; at < dim; at += p.block_rotation) this.blocks.invert(u, at);
    }
    const run = ((b * side.heads + h) * side.runs.length + row.run) * dim;
    if (p.channel_order) {
      this.copy.set(u);
      for (let i = 0; i < dim; i++) u[this.order[run + i]] = this.copy[i];
    }
    if (p.channel_scale) for (let c = 0; c < dim; c++) u[c] = f32(f32(u[c]) * this.scales[run + c]);
    if (p.balanced) this.#turnBalanced(h, u);
    if (p.raw_tokens) this.#putRaw(this.rawTokens, this.rawEntries.get(t * side.batch + b), h, u);
    if (p.raw_positions) this.#putRaw(this.rawValues, this.positions.get(t * side.batch + b), h, u);
  }

  #putRaw(values, entry, h, u) {
    if (entry === undefined) return;
    const at = (entry * this.side.heads + h) * this.dim;
    u.set(values.subarray(at, at + this.dim));
  }

  #putOutliers(packing, token, u) {
    const [flags] = packing.unpack(this.flagPlanes, token);
    let entry = 4 * this.outlierStarts[token];
    for (let c = 0; c < packing.n; c++)
      if (flags[c]) for (let i = 0; i < 4; i++) u[4 * c + i] = this.outlierValues[entry++];
  }

  #addMean(bits, page, u) {
    const { dim, meanCodes } = this;
    const scale = this.meanScales[page];
    if (bits === 8)
      for (let c = 0; c < dim; c++) u[c] = f32(u[c] + (meanCodes[page * dim + c] - 128) * scale);
    else
      for (let c = 0, half = dim / 2; c < half; c++) {
        const byte = meanCodes[page * half + c];
        u[c] = f32(u[c] + ((byte & 15) - 8) * scale);
        u[half + c] = f32(u[half + c] + ((byte >> 4) - 8) * scale);
      }
  }

  #addSigns(packing, token, u) {
    const { dim, correction } = this;
    const [digits] = packing.unpack(this.signs, token);
    for (let i = 0; i < dim; i++) correction[i] = digits[i] ? -1 : 1;
    this.signRotation.invert(correction);
    const gamma = this.signNorms[token] * Math.sqrt(Math.PI / (2 * dim));
    for (let c = 0; c < dim; c++) u[c] = f32(u[c] + gamma * correction[c]);
  }

  #turnBalanced(h, u) {
    const { dim, frame, copy } = this;
    copy.set(u);
    u.fill(0);
    for (let j = 0; j < dim; j++) {
      const x = f32(copy[j]);
      const at = (h * dim + j) * dim;
      for (let c = 0; c < dim; c++) u[c] += x * frame[at + c];
    }
  }
}
