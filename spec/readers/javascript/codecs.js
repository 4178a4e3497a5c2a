// Decoding of each codec to the coded frame (codecs/*.md). A decoder takes the streams of a side and returns
// a function of a row and values, which puts the values of one token of one head. A row has: b, h and t;
// head and token, counted over all sequences and heads; run, inRun and group, the token's place in runs; and
// ofRun and ofGroup, those of the head counted in the same way.

import { badPayload } from "./errors.js";
import { HALF, floats, roundToHalf } from "./numbers.js";
import { checkStates, ransDecode, ransTable } from "./rans.js";
import { Generator } from "./rotation.js";

const f32 = Math.fround;

// The codecs whose values are the numbers of one stream.
const plain = (name) => (data) => {
  const { dim } = data.side;
  const values = floats(data.u8(name), data.dtypes.get(name));
  return ({ token }, u) => u.set(values.subarray(token * dim, (token + 1) * dim));
};

// The first word of each chunk, in the order of groups, sequences and heads, by the index of its chunk.
function wordStarts(data, counts, rule) {
  const { side } = data;
  const starts = new Float64Array(counts.length);
  let sum = 0;
  for (let g = 0; g < side.groups; g++)
    for (let b = 0; b < side.batch; b++)
      for (let h = 0; h < side.heads; h++) {
        const index = (b * side.heads + h) * side.groups + g;
        starts[index] = sum;
        sum += counts[index];
      }
  const words = data.u16("words").length;
  if (sum !== words) badPayload(rule, `word_counts sum to ${sum}, and there are ${words} words`);
  return starts;
}

function lossless(data, codec, side) {
  const { dim, chunk, fraction } = codec;
  const unpack = data.unpacker();
  const frequencies = data.u16("frequencies");
  const states = data.u16("states");
  const counts = data.u16("word_counts");
  const words = data.u16("words");
  const starts = wordStarts(data, counts, "lossless-6");
  const symbols = new Uint8Array(chunk * dim);
  const size = 2 ** (15 - fraction);
  const bits = new Uint32Array(1);
  const value = new Float32Array(bits.buffer);
  let current = -1;
  const decodeChunk = ({ ofGroup: index, ofRun, run, inRun }) => {
    if (index === current) return;
    const at = ofRun * size;
    const table = ransTable(frequencies.subarray(at, at + size), "frequencies");
    const tokens = Math.min(chunk, side.runs[run] - (inRun - (inRun % chunk)));
    const n = tokens * dim;
    const used = ransDecode(states, index, words, starts[index], counts[index], n, [table], n, symbols);
    if (used !== counts[index])
      badPayload("rans-3", `chunk ${index} takes ${used} of its ${counts[index]} words`);
    current = index;
  };
  return (row, u) => {
    decodeChunk(row);
    const [codes] = unpack(row.token);
    const at = (row.inRun % chunk) * dim;
    for (let c = 0; c < dim; c++) {
      const word =
        ((codes[c] >> fraction) << 15) | (symbols[at + c] << fraction) | (codes[c] & ((1 << fraction) - 1));
      if (fraction === 10) u[c] = HALF[word];
      else {
        bits[0] = word << 16;
        u[c] = value[0];
      }
    }
  };
}

// Scales of 8 bits become pairs of numbers by the range of their run.
function byteScales(data) {
  const ranges = data.finite("scale_range");
  const value = (step, minimum, k) => {
    const r = f32(minimum + step * k);
    return roundToHalf(f32(r * Math.abs(r)));
  };
  for (let at = 0; at < ranges.length; at += 2)
    for (const k of [0, 255])
      if (!Number.isFinite(value(ranges[at], ranges[at + 1], k)))
        badPayload("group-7", `scale_range gives a number that is not finite at index ${at}`);
  const tables = new Map();
  return (index) => {
    if (!tables.has(index)) {
      if (tables.size > 4096) tables.clear();
      const table = new Float64Array(512);
      for (let k = 0; k < 512; k++) {
        const at = 4 * index + (k < 256 ? 0 : 2);
        table[k] = value(ranges[at], ranges[at + 1], k & 255);
      }
      tables.set(index, table);
    }
    return tables.get(index);
  };
}

function group(data, codec, side) {
  const { dim, size } = codec;
  const unpack = data.unpacker();
  const small = codec.scale_dtype ? byteScales(data) : null;
  const scales = small ? data.u8("scales") : data.finite("scales");
  const middle = (2 ** codec.bits - 1) / 2;
  const tokenScales = codec.token_scale === "none" ? null : data.finite("token_scale");
  const perHead = codec.token_scale.endsWith("-per-head");
  const ofTokens = codec.axis === "token";
  const groups = Math.ceil(dim / size);
  return ({ b, t, token, ofGroup, ofRun }, u) => {
    const [codes] = unpack(token);
    // With axis token the group is a row of scales; key_mean, which changes the rows of groups, needs axis
    // channel.
    const at = 2 * (ofTokens ? ofGroup * dim : token * groups);
    const table = small?.(ofRun);
    const factor = tokenScales ? tokenScales[perHead ? token : b * side.packed + t] : 0;
    for (let j = 0; j < dim; j++) {
      const pair = at + 2 * (ofTokens ? j : Math.floor(j / size));
      const scale = table ? table[scales[pair]] : scales[pair];
      const centre = table ? table[256 + scales[pair + 1]] : scales[pair + 1];
      const value = f32((codes[j] - middle) * scale + centre);
      u[j] = tokenScales ? f32(value * factor) : value;
    }
  };
}

const ELEMENTS = { e4m3: [4, 3, 7, 0x7f], e5m2: [5, 2, 15, 0x7c], e2m1: [2, 1, 1, 8] };

// The value of each code of an element, NaN where it is not finite.
function elements(name) {
  const [exponentBits, fractionBits, bias, notFinite] = ELEMENTS[name];
  const sign = 1 << (exponentBits + fractionBits);
  return Float64Array.from({ length: 2 * sign }, (_, code) => {
    const size = code & (sign - 1);
    if (size >= notFinite) return NaN;
    const e = size >> fractionBits;
    const f = (size & ((1 << fractionBits) - 1)) / 2 ** fractionBits;
    const value = e ? 2 ** (e - bias) * (1 + f) : 2 ** (1 - bias) * f;
    return code & sign ? -value : value;
  });
}

function minifloat(data, codec, side) {
  const { dim, granularity, scale_dtype: dtype } = codec;
  const unpack = data.unpacker();
  const values = elements(codec.element);
  const blocks = granularity === "block" ? data.u8("block_scales") : null;
  const width = dtype === "e8m0" ? 32 : 16;
  const perToken = Math.ceil(dim / width);
  if (dtype === "e8m0" && blocks.includes(255)) badPayload("minifloat-7", "an e8m0 scale is NaN");
  if (dtype === "e4m3" && blocks.some((code) => code > 0x7e))
    badPayload("minifloat-8", "an e4m3 scale is NaN or below zero");
  const scales = dtype === "e8m0" ? null : data.finite(dtype === "e4m3" ? "global_scale" : "scale");
  const wide = elements("e4m3");
  return ({ b, run, token, ofRun }, u) => {
    const [codes] = unpack(token);
    const index = { head: ofRun, token }[granularity] ?? b * side.runs.length + run;
    const scale = scales ? scales[index] : 1;
    for (let j = 0; j < dim; j++) {
      const v = values[codes[j]];
      if (Number.isNaN(v)) badPayload("minifloat-6", `the element ${codes[j]} is not finite`);
      if (!blocks) u[j] = f32(v * scale);
      else {
        const block = blocks[token * perToken + Math.floor(j / width)];
        u[j] = f32(dtype === "e8m0" ? v * 2 ** (block - 127) : v * wide[block] * scale);
      }
    }
  };
}

function scalar(data, codec) {
  const { dim } = codec;
  const unpack = data.unpacker();
  const norms = data.norms("norm");
  const coordinates = [codec.magnitude_table, codec.high_magnitude_table].map((bytes) => {
    const magnitudes = floats(bytes, "F32");
    return Float32Array.from([...magnitudes, ...magnitudes.map((magnitude) => -magnitude)]);
  });
  return ({ token }, u) => {
    const digits = unpack(token);
    const norm = norms[token];
    const next = [0, 0];
    for (let c = 0; c < dim; c++) {
      const i = codec.isHigh[c] ? 1 : 0;
      u[c] = f32(coordinates[i][digits[i][next[i]++]] * norm);
    }
  };
}

function octahedral(data, codec) {
  const { dim, packings, triplets, b_dir: bits } = codec;
  const unpack = data.unpacker();
  const norms = data.norms("norm");
  const lengths = floats(codec.norm_table, "F32");
  const count = 2 ** (bits - 1);
  const directions = octahedralDirections(floats(codec.direction_table, "F32"));
  const direct = codec.arrangement === "direct";
  const indexMask = 2 ** codec.indexBits - 1;
  const area = count * count;
  return ({ token }, u) => {
    const digits = unpack(token);
    const joined = direct && !codec.twoDigits;
    for (let i = triplets; direct && i < packings[0].n; i++)
      if (digits.some((digit) => digit[i])) badPayload("octahedral-5", `the padding triplet ${i} is not 0`);
    const norm = norms[token];
    for (let i = 0; i < triplets; i++) {
      const last = digits[digits.length - 1][i];
      const index = joined ? last & indexMask : digits.length > 1 ? digits[0][i] : 0;
      const sign = joined ? last >> codec.indexBits : last;
      const length = lengths[codec.normInIndex ? Math.floor(index / area) : sign >> 2];
      const at = 3 * (index % area);
      const x = directions[at];
      const y = directions[at + 1];
      u[3 * i] = f32(f32((sign & 1 ? -x : x) * length) * norm);
      if (3 * i + 1 < dim) u[3 * i + 1] = f32(f32((sign & 2 ? -y : y) * length) * norm);
      if (3 * i + 2 < dim) u[3 * i + 2] = f32(f32(directions[at + 2] * length) * norm);
    }
  };
}

function octahedralDirections(table) {
  const count = table.length;
  const result = new Float32Array(3 * count * count);
  for (let j = 0; j < count; j++)
    for (let i = 0; i < count; i++) {
      const z = 1 - table[i] - table[j];
      const x = z >= 0 ? table[i] : 1 - table[j];
      const y = z >= 0 ? table[j] : 1 - table[i];
      const l = Math.sqrt(x * x + y * y + z * z);
      result.set([x / l, y / l, z / l], 3 * (i + count * j));
    }
  return result;
}

const words = new Map();

// The codewords of quaternion: four binary32 components each. The last ones made are kept.
function codewords(seed, secondary) {
  const name = `${seed} ${secondary}`;
  if (words.has(name)) return words.get(name);
  const units = [];
  for (let axis = 0; axis < 4; axis++)
    for (const sign of [1, -1]) units.push([0, 1, 2, 3].map((i) => (i === axis ? sign : 0)));
  for (let p = 0; p < 16; p++) units.push([0, 1, 2, 3].map((i) => ((p >> i) & 1 ? -0.5 : 0.5)));
  const generator = new Generator(seed);
  const result = new Float32Array(96 * secondary);
  for (let s = 0; s < secondary; s++) {
    const [w, x, y, z] = generator.quaternion().map(f32);
    units.forEach(([a, b, c, d], p) => {
      const at = 4 * (24 * s + p);
      result[at] = a * w - b * x - c * y - d * z;
      result[at + 1] = a * x + b * w + c * z - d * y;
      result[at + 2] = a * y - b * z + c * w + d * x;
      result[at + 3] = a * z + b * y - c * x + d * w;
    });
  }
  words.clear();
  words.set(name, result);
  return result;
}

function quaternion(data, codec) {
  const { dim, chunks, low } = codec;
  const unpack = data.unpacker();
  const scales = data.finite("scale");
  const table = codewords(codec.seed, codec.secondary);
  const steps = 2 ** codec.radius_bits - 1;
  return ({ token }, u) => {
    const digits = unpack(token);
    const radii = digits[digits.length - 1];
    const unit = f32(scales[token] / steps);
    for (let i = 0; i < chunks; i++) {
      const codeword = low ? digits[1][i] * low + digits[0][i] : digits[0][i];
      const r = f32(radii[i] * unit);
      for (let k = 0; k < 4 && 4 * i + k < dim; k++) u[4 * i + k] = f32(r * table[4 * codeword + k]);
    }
  };
}

// cos and sin of 2π · turns / parts, exact where they are 0, ±1/2 or ±1.
function direction(turns, parts) {
  const quarter = Math.floor((4 * turns) / parts);
  const rest = 4 * turns - quarter * parts;
  const upper = 2 * rest > parts;
  const angle = (Math.PI / 2) * ((upper ? parts - rest : rest) / parts);
  const [c, s] = upper ? [Math.sin(angle), Math.cos(angle)] : [Math.cos(angle), Math.sin(angle)];
  return [
    [c, s],
    [-s, c],
    [-c, -s],
    [s, -c],
  ][quarter % 4].map((value) => (value === 0 ? 0 : f32(value)));
}

function directionTable(bins) {
  const result = new Float32Array(2 * bins);
  for (let k = 0; k < bins; k++) result.set(direction(2 * k + 1, 2 * bins), 2 * k);
  return result;
}

function angle(data, codec) {
  const { low, norm } = codec;
  const unpack = data.unpacker();
  const numbers = data.finite(norm === "fp32" ? "norm" : "range");
  const directions = directionTable(codec.bins);
  const pairs = codec.dim / 2;
  // The norm of each code that a token has; NaN for those not computed yet.
  const table = new Float64Array(2 ** codec.norm_bits);
  return ({ token }, u) => {
    const digits = unpack(token);
    const codes = digits[digits.length - 1];
    table.fill(NaN);
    for (let i = 0; i < pairs; i++) {
      const bin = low ? digits[1][i] * low + digits[0][i] : digits[0][i];
      let r = norm === "fp32" ? numbers[token * pairs + i] : table[codes[i]];
      if (r !== r) {
        const e = f32(numbers[2 * token + 1] + numbers[2 * token] * codes[i]);
        table[codes[i]] = r = norm === "linear" ? e : f32(2 ** e);
      }
      u[2 * i] = f32(r * directions[2 * bin]);
      u[2 * i + 1] = f32(r * directions[2 * bin + 1]);
    }
  };
}

function polar(data, codec) {
  const { dim, levels, radii: count } = codec;
  const unpack = data.unpacker();
  const radii = data.finite("radius");
  const angles = floats(codec.angle_table, "F32");
  const above = Float32Array.from([...angles].flatMap((psi) => [Math.cos(psi), Math.sin(psi)]));
  const first = directionTable(2 ** levels[0].bits);
  let next = new Float64Array(dim);
  let values = new Float64Array(dim);
  return ({ token }, u) => {
    const digits = unpack(token);
    for (let i = 0; i < count; i++) values[i] = radii[token * count + i];
    for (let l = levels.length - 1; l >= 0; l--) {
      const { pairs, equal, odd, table, unequalTable, stream, from } = levels[l];
      const codes = digits[stream];
      for (let i = 0; i < pairs; i++) {
        const code = codes[from + i];
        const directions = l ? above : first;
        const at = 2 * (l ? (i < equal ? table : unequalTable) + code : code);
        next[2 * i] = f32(values[i] * directions[at]);
        next[2 * i + 1] = f32(values[i] * directions[at + 1]);
      }
      if (odd) next[2 * pairs] = values[pairs];
      [values, next] = [next, values];
    }
    u.set(values);
  };
}

function trellis(data, codec) {
  const { dim, bits, state_bits: width, values } = codec;
  const string = data.u16("codes.0");
  const norms = data.norms("norm");
  const count = (dim * bits) / 16;
  const mask = 2 ** width - 1;
  return ({ token }, u) => {
    const at = token * count;
    for (let c = 0; c < dim; c++) {
      const first = (bits * (c + 1) - width + 16 * count) % (16 * count);
      const word = first >> 4;
      const pair = string[at + word] | (string[at + ((word + 1) % count)] << 16);
      u[c] = f32(values[(pair >>> (first & 15)) & mask] * norms[token]);
    }
  };
}

function klt(data, codec, side) {
  const { dim } = codec;
  const gains = codec.gain === "fp16" ? data.finite("gain") : null;
  const stored = codec.rows === "basis" ? null : data.finite("rows");
  const basis = stored ? null : data.basis(codec.basis, "klt-5");
  const rows = stored ?? basis?.rowsFor(codec.layer, codec.side, dim, side.heads) ?? null;
  const size = codec.rowCount * dim;
  const { columns, shortRuns: runs } = codec;
  const unpack = data.unpacker();
  const codes = codec.ofHeads ? data.u8("codes") : null;
  const readers = codes && Array.from({ length: side.heads }, (_, h) => shortColumns(runs, h));
  if (codes) checkShortRuns(codec, runs, codes);
  const bases = new Map();
  // The mean of a head in the original frame.
  const meanOf = (head, at) => {
    if (!bases.has(head)) {
      if (bases.size > 4096) bases.clear();
      const mean = new Float64Array(dim);
      for (let j = 0; j < dim; j++) {
        const m = f32(256 * rows[at + j]);
        for (let c = 0; c < dim; c++) mean[c] += m * rows[at + (1 + j) * dim + c];
      }
      bases.set(head, mean);
    }
    return bases.get(head);
  };
  return ({ b, h, t, token, ofRun }, u) => {
    const digits = unpack(token);
    if (!rows) return;
    const index = stored ? ofRun : h;
    const at = index * (stored ? size : rows.length / side.heads);
    u.set(meanOf(index, at));
    const gain = gains ? gains[token] : 1;
    const tables = at + (2 + dim) * dim;
    const add = (column, width, code) => {
      const v = rows[tables + 510 * (column >> 4) + 2 ** width - 2 + code] * gain;
      const from = at + (1 + column) * dim;
      for (let c = 0; c < dim; c++) u[c] += v * rows[from + c];
    };
    if (columns)
      columns.forEach(({ width, list }, i) => list.forEach((column, k) => add(column, width, digits[i][k])));
    else {
      const start = 8 * (b * side.packed + t) * codec.rowBytes;
      for (const { column, width, bit } of readers[h]) {
        const place = start + bit;
        const byte = place >> 3;
        const pair = codes[byte] | (codes[byte + 1] << 8);
        add(column, width, (pair >> (place & 7)) & (2 ** width - 1));
      }
    }
  };
}

// The columns of one head: the width and first bit of the code of each.
function shortColumns(runs, head) {
  const ofHead = runs.filter((run) => run.head === head && run.width);
  return ofHead.flatMap(({ first, width, count, bit }) =>
    Array.from({ length: count }, (_, j) => ({ column: first + j, width, bit: bit + j * width })),
  );
}

function checkShortRuns(codec, runs, codes) {
  for (const { width, count, bit } of runs) {
    const bits = width * count;
    if (bits % 8 === 0) continue;
    for (let at = (bit + bits) >> 3; at < codes.length; at += codec.rowBytes)
      if (codes[at] >> (bits % 8)) badPayload("klt-11", `byte ${at} of codes has a bit of no column`);
  }
}

function transform(data, codec, side) {
  const { dim, chunk, scope } = codec;
  const groups = side.groups;
  const layer = scope === "layer";
  const stream = transformStreams(data, codec, side);
  const basis = data.basis(codec.basis, "transform-5");
  if (!basis) {
    for (let index = 0; index < stream.columns.length; index++) checkStates(stream.states, index);
    return () => {};
  }
  const frame = basis.framesFor(codec, side.heads);
  const n = layer ? side.heads * dim : dim;
  const rope = codec.side === "k" ? basis.rope(codec.layer) : null;
  const symbols = new Uint8Array(chunk * dim);
  // The factors of the blocks at hand: of all heads of a sequence and group, or of one.
  const factors = new Map();
  let current = -1;
  const decodeBlock = (b, h, group) => {
    const index = (b * side.heads + h) * groups + group;
    const tokens = stream.tokens[b * groups + group];
    const columns = stream.columns[index];
    const frameIndex = layer ? 0 : h;
    const tables = Array.from({ length: columns }, (_, c) =>
      frame.table(frameIndex * n + (layer ? c * side.heads + h : c), codec.step),
    );
    const count = columns * tokens;
    const [from, all] = [stream.starts[index], stream.counts[index]];
    const { states, words } = stream;
    const used = ransDecode(states, index, words, from, all, count, tables, tokens || 1, symbols);
    let next = from + used;
    const levels = new Float64Array(count);
    for (let i = 0; i < count; i++)
      if (symbols[i]) levels[i] = tables[Math.floor(i / tokens)].values[symbols[i] - 1];
      else {
        if (next + 2 > from + all) badPayload("transform-11", `chunk ${index} has more escapes than words`);
        levels[i] = words[next] | (words[next + 1] << 16) | 0;
        next += 2;
      }
    if (next !== from + all)
      badPayload("transform-11", `chunk ${index} takes ${next - from} of its ${all} words`);
    factors.set(h, { columns, tokens, levels });
  };
  const step = 2 ** (-codec.step / 16);
  return ({ b, h, group, inRun, ofGroup }, u) => {
    const block = layer ? b * groups + group : ofGroup;
    if (block !== current) {
      factors.clear();
      for (let head = layer ? 0 : h; head < (layer ? side.heads : h + 1); head++) decodeBlock(b, head, group);
      current = block;
    }
    const token = inRun % chunk;
    const base = layer ? 0 : h * (1 + n) * n;
    const first = layer ? h * dim : 0;
    for (let c = 0; c < dim; c++) u[c] = frame.rows[base + first + c];
    for (const [head, { columns, tokens, levels }] of factors)
      for (let j = 0; j < columns; j++) {
        const level = levels[j * tokens + token];
        if (level === 0) continue;
        const v = step * level;
        const from = base + (1 + (layer ? j * side.heads + head : j)) * n + first;
        for (let c = 0; c < dim; c++) u[c] += v * frame.rows[from + c];
      }
    if (rope) turn(rope, stream.positions[b * groups + group] + token, u);
  };
}

// The streams of transform, checked as far as that needs no basis.
function transformStreams(data, codec, side) {
  const { dim, chunk } = codec;
  const { groups } = side;
  const tokens = data.u16("tokens");
  const columns = data.u16("columns");
  const pairs = data.u16("word_counts");
  const checkTokens = (group, found, expected) =>
    found === expected || badPayload("transform-8", `group ${group} has ${found} tokens, not ${expected}`);
  let group = 0;
  for (const run of side.runs)
    for (let start = 0; start < run; start += chunk, group++)
      for (let b = 0; b < side.batch; b++)
        checkTokens(group, tokens[b * groups + group], Math.min(chunk, run - start));
  if (columns.some((count) => count > dim)) badPayload("transform-9", `a block has more columns than ${dim}`);
  const join = (words) =>
    Float64Array.from({ length: words.length / 2 }, (_, i) => words[2 * i] + 65536 * words[2 * i + 1]);
  const counts = join(pairs);
  const starts = wordStarts(data, counts, "transform-10");
  const positions = codec.side === "k" ? join(data.u16("positions")) : null;
  return { tokens, columns, counts, starts, positions, words: data.u16("words"), states: data.u16("states") };
}

// Turn a row to a position (basis.md, Rotary positions).
function turn({ frequencies, halves }, position, u) {
  const pairs = frequencies.length;
  for (let i = 0; i < pairs; i++) {
    const [a, b] = halves ? [i, i + pairs] : [2 * i, 2 * i + 1];
    const theta = position * frequencies[i];
    const [c, s] = [Math.cos(theta), Math.sin(theta)];
    const x = u[a];
    u[a] = x * c - u[b] * s;
    u[b] = u[b] * c + x * s;
  }
}

export const DECODERS = {
  raw: plain("values"),
  lossless,
  group,
  minifloat,
  scalar,
  octahedral,
  quaternion,
  angle,
  polar,
  trellis,
  klt,
  transform,
  opaque: plain("bytes"),
};
