// Decoding of each codec to the coded frame (codecs/*.md). A decoder takes the streams of a side and returns
// a function of a row and values, which puts the values of one token of one head; the token's symbols are in
// data.digits. A row has: b, h and t; token, counted over all sequences and heads; run, inRun and group, the
// token's place in runs; and ofRun and ofGroup, those of the head counted in the same way.
import { badPayload, must } from "./errors.js";
import { HALF, floats, range, roundToHalf, view } from "./numbers.js";
import { vectorCount } from "./parameters.js";
import { Segments, ransTable } from "./rans.js";
import { Generator } from "./rotation.js";

const f32 = Math.fround;
// Adds `count` rows of a matrix to u, each multiplied by a factor. Row i begins at `base` + starts[i].
export function addRows(u, matrix, base, starts, factors, count) {
  let i = 0;
  for (; i + 4 <= count; i += 4) {
    const [p, q, r, s] = [factors[i], factors[i + 1], factors[i + 2], factors[i + 3]];
    const at = base + starts[i];
    const [b, c, d] = [starts[i + 1] - starts[i], starts[i + 2] - starts[i], starts[i + 3] - starts[i]];
    for (let k = 0, m = at; k < u.length; k++, m++)
      u[k] = u[k] + p * matrix[m] + q * matrix[m + b] + r * matrix[m + c] + s * matrix[m + d];
  }
  for (; i < count; i++) for (let k = 0; k < u.length; k++) u[k] += factors[i] * matrix[base + starts[i] + k];
}
// Codecs whose values are the numbers of one stream.
const plain = (name) => (data) => {
  const values = data.floats(name);
  return ({ token }, u) => {
    for (let c = 0, at = token * u.length; c < u.length; c++) u[c] = values[at + c];
  };
};

function lossless(data, { dim, chunk, fraction }) {
  const [[codes], frequencies] = [data.digits, data.u16("frequencies")];
  const segments = new Segments(data, data.u16("word_counts"), "lossless-6");
  const symbols = new Uint8Array(chunk * dim);
  const [size, mask] = [2 ** (15 - fraction), 2 ** fraction - 1];
  const bits = new Uint32Array(1);
  const value = new Float32Array(bits.buffer);
  let current = -1;
  const decodeSegment = ({ ofGroup: index, ofRun, run, inRun }) => {
    const table = ransTable(frequencies.subarray(ofRun * size, (ofRun + 1) * size), "frequencies");
    const n = dim * Math.min(chunk, data.side.runs[run] - (inRun - (inRun % chunk)));
    if (segments.decode(index, n, [table], n, symbols) !== segments.end(index))
      badPayload("rans-3", `segment ${index} has more words than it takes`);
    current = index;
  };
  return (row, u) => {
    if (row.ofGroup !== current) decodeSegment(row);
    for (let c = 0, at = (row.inRun % chunk) * dim; c < dim; c++, at++) {
      const word = ((codes[c] >> fraction) << 15) | (symbols[at] << fraction) | (codes[c] & mask);
      bits[0] = word << 16;
      u[c] = fraction === 10 ? HALF[word] : value[0];
    }
  };
}
// Scales of 8 bits become pairs of numbers by the range of their run: a table of 256 scales and 256 centers.
function byteScales(data) {
  const ranges = data.finite("scale_range");
  const value = (pair, k) => {
    const r = f32(ranges[pair + 1] + ranges[pair] * k);
    return roundToHalf(f32(r * Math.abs(r)));
  };
  for (let pair = 0; pair < ranges.length; pair += 2)
    if (!Number.isFinite(value(pair, 0)) || !Number.isFinite(value(pair, 255)))
      badPayload("group-7", `scale_range gives a number that is not finite at index ${pair}`);
  const table = new Float64Array(512);
  let current = -1;
  return (run) => {
    if (run !== current) for (let k = 0; k < 512; k++) table[k] = value(4 * run + 2 * (k >> 8), k & 255);
    current = run;
    return table;
  };
}

function group(data, { dim, size, bits, axis, scale_dtype: small, token_scale: ofToken }) {
  const [codes] = data.digits;
  const table = small ? byteScales(data) : null;
  const scales = small ? data.u8("scales") : data.finite("scales");
  const middle = (2 ** bits - 1) / 2;
  const factors = ofToken === "none" ? null : data.finite("token_scale");
  const [perHead, byToken] = [ofToken.endsWith("-per-head"), axis === "token"];
  const pairs = byToken ? dim : Math.ceil(dim / size);
  const shift = byToken ? 0 : Math.log2(size);
  return ({ b, t, token, ofGroup, ofRun }, u) => {
    // With axis token the group is a row of scales; key_mean, which changes groups, needs axis channel.
    const at = 2 * pairs * (byToken ? ofGroup : token);
    const values = table?.(ofRun);
    const factor = factors ? factors[perHead ? token : b * data.side.packed + t] : 1;
    for (let j = 0; j < dim; j++) {
      const pair = at + 2 * (j >> shift);
      const scale = values ? values[scales[pair]] : scales[pair];
      const center = values ? values[256 + scales[pair + 1]] : scales[pair + 1];
      u[j] = f32(f32((codes[j] - middle) * scale + center) * factor);
    }
  };
}
// For each element: its fraction bits, its bias, its sign bit, and the first code that is not finite.
const ELEMENTS = { e4m3: [3, 7, 128, 0x7f], e5m2: [2, 15, 128, 0x7c], e2m1: [1, 1, 8, 8] };
// The value of each code of an element, NaN where it is not finite.
function elements(name) {
  const [fractionBits, bias, sign, notFinite] = ELEMENTS[name];
  return range(2 * sign, (code) => {
    const size = code & (sign - 1);
    const [e, f] = [size >> fractionBits, (size / 2 ** fractionBits) % 1];
    const value = e ? 2 ** (e - bias) * (1 + f) : 2 ** (1 - bias) * f;
    return size >= notFinite ? NaN : code & sign ? -value : value;
  });
}

function minifloat(data, { dim, element, granularity, scale_dtype: dtype }) {
  const [codes] = data.digits;
  const values = elements(element);
  const blocks = granularity === "block" ? data.u8("block_scales") : null;
  const ofBlocks = Float64Array.from({ length: 256 }, (_, code) => 2 ** (code - 127));
  if (dtype === "e4m3") ofBlocks.set(elements("e4m3"));
  const shift = dtype === "e8m0" ? 5 : 4;
  const perToken = Math.ceil(dim / 2 ** shift);
  must(dtype !== "e8m0" || !blocks.includes(255), "minifloat-7", "an e8m0 scale is NaN");
  const positive = dtype !== "e4m3" || !blocks.some((code) => code > 126);
  must(positive, "minifloat-8", "an e4m3 scale is NaN or below 0");
  const scales = dtype === "e8m0" ? null : data.finite(dtype === "e4m3" ? "global_scale" : "scale");
  return ({ b, run, token, ofRun }, u) => {
    const index = { head: ofRun, token }[granularity] ?? b * data.side.runs.length + run;
    const scale = scales ? scales[index] : 1;
    for (let j = 0; j < dim; j++) {
      const v = values[codes[j]];
      if (v !== v) badPayload("minifloat-6", `the element ${codes[j]} is not finite`);
      u[j] = f32(blocks ? v * ofBlocks[blocks[token * perToken + (j >> shift)]] * scale : v * scale);
    }
  };
}

function scalar(data, { dim, isHigh, magnitudes }) {
  const { digits } = data;
  const norms = data.norms("norm");
  const values = magnitudes.map((table) => Float32Array.from([...table, ...table.map((x) => -x)]));
  const next = [0, 0];
  return ({ token }, u) => {
    next.fill(0);
    for (let c = 0; c < dim; c++) {
      const i = isHigh[c];
      u[c] = f32(values[i][digits[i][next[i]++]] * norms[token]);
    }
  };
}

function octahedral(data, codec) {
  const { dim, b_dir: bits, indexBits, normInIndex, joined, lengths } = codec;
  const triplets = Math.ceil(dim / 3);
  const { digits } = data;
  const norms = data.norms("norm");
  const directions = octahedralDirections(codec.directions);
  const area = 4 ** (bits - 1);
  const last = digits.at(-1);
  const padding = codec.arrangement === "direct" ? codec.packings[0].n : 0;
  return ({ token }, u) => {
    for (let i = triplets; i < padding; i++)
      if (digits.some((digit) => digit[i])) badPayload("octahedral-5", `the padding triplet ${i} is not 0`);
    for (let i = 0; i < triplets; i++) {
      const index = joined ? last[i] & (2 ** indexBits - 1) : digits.length > 1 ? digits[0][i] : 0;
      const sign = joined ? last[i] >> indexBits : last[i];
      const length = lengths[normInIndex ? Math.floor(index / area) : sign >> 2];
      const at = 3 * (index % area);
      for (let k = 0; k < 3 && 3 * i + k < dim; k++) {
        const x = directions[at + k];
        u[3 * i + k] = f32(f32((sign >> k) & 1 && k < 2 ? -x * length : x * length) * norms[token]);
      }
    }
  };
}
// The direction of each index, three components each.
function octahedralDirections(table) {
  const one = (a, b) => {
    const z = 1 - a - b;
    const [x, y] = z >= 0 ? [a, b] : [1 - b, 1 - a];
    const l = Math.sqrt(x * x + y * y + z * z);
    return [x / l, y / l, z / l];
  };
  return Float32Array.from([...table].flatMap((b) => [...table].flatMap((a) => one(a, b))));
}
let lastWords = {};
// The codewords of quaternion, four binary32 components each. The last result is cached.
function codewords(seed, secondary) {
  if (lastWords.seed === seed && lastWords.secondary === secondary) return lastWords.words;
  const unit = (p) =>
    range(4, (i) => (p > 7 ? 0.5 - (((p - 8) >> i) & 1) : p >> 1 === i ? 1 - 2 * (p & 1) : 0));
  const units = range(24, unit);
  const generator = new Generator(seed);
  const words = new Float32Array(96 * secondary);
  for (let s = 0; s < secondary; s++) {
    const [w, x, y, z] = generator.quaternion().map(f32);
    units.forEach(([a, b, c, d], p) => {
      const at = 4 * (24 * s + p);
      words[at] = a * w - b * x - c * y - d * z;
      words[at + 1] = a * x + b * w + c * z - d * y;
      words[at + 2] = a * y - b * z + c * w + d * x;
      words[at + 3] = a * z + b * y - c * x + d * w;
    });
  }
  lastWords = { seed, secondary, words };
  return words;
}

function quaternion(data, { dim, low = 0, seed, secondary, radius_bits: bits }) {
  const { digits } = data;
  const [scales, words] = [data.finite("scale"), codewords(seed, secondary)];
  const [first, second, radii] = [digits[0], digits[1], digits.at(-1)];
  return ({ token }, u) => {
    const unit = f32(scales[token] / (2 ** bits - 1));
    for (let i = 0; 4 * i < dim; i++) {
      const at = 4 * (low ? second[i] * low + first[i] : first[i]);
      const r = f32(radii[i] * unit);
      for (let k = 0; k < 4 && 4 * i + k < dim; k++) u[4 * i + k] = f32(r * words[at + k]);
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
  const turned = [c, s, -c, -s];
  return [turned[[0, 3, 2, 1][quarter % 4]], turned[[1, 0, 3, 2][quarter % 4]]].map((x) => f32(x) + 0);
}
const directionTable = (bins) => Float32Array.from(range(bins, (k) => direction(2 * k + 1, 2 * bins)).flat());

function angle(data, { dim, low = 0, norm, norm_bits: bits, bins }) {
  const { digits } = data;
  const numbers = data.finite(norm === "fp32" ? "norm" : "range");
  const directions = directionTable(bins);
  const [first, second, codes] = [digits[0], digits[1], digits.at(-1)];
  // Norms of a token by code. NaN means that a norm has not been computed yet.
  const table = new Float64Array(2 ** bits);
  return ({ token }, u) => {
    table.fill(NaN);
    for (let i = 0; 2 * i < dim; i++) {
      const at = 2 * (low ? second[i] * low + first[i] : first[i]);
      let r = norm === "fp32" ? numbers[(token * dim) / 2 + i] : table[codes[i]];
      if (r !== r) {
        const e = f32(numbers[2 * token + 1] + numbers[2 * token] * codes[i]);
        table[codes[i]] = r = norm === "linear" ? e : f32(2 ** e);
      }
      u[2 * i] = f32(r * directions[at]);
      u[2 * i + 1] = f32(r * directions[at + 1]);
    }
  };
}

function polar(data, { dim, levels, radii: count, angle_table: bytes, anglesOfFirst }) {
  const { digits } = data;
  const radii = data.finite("radius");
  const above = Float32Array.from([...floats(bytes, "F32")].flatMap((psi) => [Math.cos(psi), Math.sin(psi)]));
  const first = directionTable(anglesOfFirst);
  let [next, values] = [new Float64Array(dim), new Float64Array(dim)];
  return ({ token }, u) => {
    for (let i = 0; i < count; i++) values[i] = radii[token * count + i];
    for (let l = levels.length - 1; l >= 0; l--) {
      const { pairs, equal, odd, tables, stream, from } = levels[l];
      const directions = l ? above : first;
      for (let i = 0; i < pairs; i++) {
        const at = 2 * (tables[i < equal ? 0 : 1] + digits[stream][from + i]);
        next[2 * i] = f32(values[i] * directions[at]);
        next[2 * i + 1] = f32(values[i] * directions[at + 1]);
      }
      if (odd) next[2 * pairs] = values[pairs];
      [values, next] = [next, values];
    }
    u.set(values);
  };
}

function trellis(data, { dim, bits, state_bits: width, values }) {
  const [string, norms] = [data.u16("codes.0"), data.norms("norm")];
  const [count, mask] = [(dim * bits) / 16, 2 ** width - 1];
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

function klt(data, codec) {
  const { side } = data;
  const { dim, layer, columns, shortRuns: runs, rowBytes } = codec;
  const gains = codec.gain === "fp16" ? data.finite("gain") : null;
  const stored = codec.rows === "basis" ? null : data.finite("rows");
  const basis = stored ? null : data.basis(codec.basis, "klt-5");
  const vectors = stored ?? basis?.vectors(layer, codec.side, dim, side.heads);
  const { digits } = data;
  const codes = runs ? data.u8("codes") : null;
  if (runs) checkShortRuns(codec, codes);
  const ofHeads = runs && range(side.heads, (h) => shortColumns(runs, h));
  const size = vectors && (stored ? vectorCount(dim) * dim : vectors.length / side.heads);
  const starts = Int32Array.from(range(dim, (j) => (1 + j) * dim));
  const factors = new Float64Array(dim);
  return ({ b, h, t, token, ofRun }, u) => {
    if (!vectors) return;
    const at = size * (stored ? ofRun : h);
    const tables = at + (2 + dim) * dim;
    const gain = gains ? gains[token] : 1;
    for (let j = 0; j < dim; j++) factors[j] = f32(256 * vectors[at + j]);
    const add = (column, width, code) =>
      (factors[column] += vectors[tables + 510 * (column >> 4) + 2 ** width - 2 + code] * gain);
    if (runs)
      for (const { column, width, byte, bit } of ofHeads[h]) {
        const place = (b * side.packed + t) * rowBytes + byte;
        add(column, width, ((codes[place] | (codes[place + 1] << 8)) >> bit) & (2 ** width - 1));
      }
    else
      columns.forEach(({ width, list }, i) => list.forEach((column, k) => add(column, width, digits[i][k])));
    u.fill(0);
    addRows(u, vectors, at, starts, factors, dim);
  };
}
// The columns of a head that have codes: the width of each, and where its code begins in a row of bytes.
function shortColumns(runs, head) {
  const columns = ({ first, width, count, byte }) =>
    range(count, (j) => ({
      column: first + j,
      width,
      byte: byte + ((j * width) >> 3),
      bit: (j * width) & 7,
    }));
  return runs.filter((run) => run.head === head && run.width).flatMap(columns);
}

function checkShortRuns({ shortRuns, rowBytes }, codes) {
  for (const { width, count, byte } of shortRuns) {
    const bits = width * count;
    for (let at = byte + (bits >> 3); bits % 8 && at < codes.length; at += rowBytes)
      if (codes[at] >> (bits % 8)) badPayload("klt-11", `byte ${at} of codes has a bit of no column`);
  }
}

function transform(data, codec) {
  const { heads, groups } = data.side;
  const { dim, chunk } = codec;
  const { segments, tokens, columns, positions } = transformStreams(data, codec);
  const basis = data.basis(codec.basis, "transform-5");
  if (!basis) {
    columns.forEach((_, index) => segments.check(index));
    return () => {};
  }
  const { values, table } = basis.frames(codec, heads);
  const rope = codec.side === "k" ? basis.rope(codec.layer) : null;
  const [layer, step] = [codec.scope === "layer", 2 ** (-codec.step / 16)];
  const n = layer ? heads * dim : dim;
  const symbols = new Uint8Array(chunk * dim);
  // The levels of a head in a token group, and the matrix row of each of its columns.
  const decodeBlock = (b, h, group) => {
    const index = (b * heads + h) * groups + group;
    const count = tokens[b * groups + group];
    const rows = range(columns[index], (c) => (layer ? c * heads + h : c));
    const tables = rows.map((row) => table((layer ? 0 : h * n) + row, codec.step));
    const levels = new Float64Array(rows.length * count);
    let next = segments.decode(index, levels.length, tables, count || 1, symbols);
    const { words } = segments;
    for (let i = 0; i < levels.length; i++) {
      if (symbols[i]) levels[i] = tables[Math.floor(i / count)].values[symbols[i] - 1];
      else {
        levels[i] = words[next] | (words[next + 1] << 16);
        next += 2;
      }
    }
    if (next !== segments.end(index)) badPayload("transform-11", `segment ${index} has other escapes`);
    return { count, levels, starts: rows.map((row) => (1 + row) * n) };
  };
  // The blocks whose sum gives the values of a token: those of all heads, or the block of one head.
  let [blocks, current] = [[], -1];
  const [starts, factors] = [new Int32Array(dim), new Float64Array(dim)];
  return ({ b, h, group, inRun, ofGroup }, u) => {
    const block = layer ? b * groups + group : ofGroup;
    if (block !== current)
      blocks = (layer ? range(heads, (i) => i) : [h]).map((i) => decodeBlock(b, i, group));
    current = block;
    const [token, base] = [inRun % chunk, layer ? h * dim : h * (1 + n) * n];
    for (let c = 0; c < dim; c++) u[c] = values[base + c];
    for (const { count, levels, starts: ofColumns } of blocks) {
      let some = 0;
      for (let j = 0; j < ofColumns.length; j++) {
        const level = levels[j * count + token];
        if (level === 0) continue;
        starts[some] = ofColumns[j];
        factors[some++] = step * level;
      }
      addRows(u, values, base, starts, factors, some);
    }
    if (rope) turn(rope, positions[b * groups + group] + token, u);
  };
}
// The streams of transform, after the checks that do not need a basis.
function transformStreams(data, { dim, chunk, side: which }) {
  const { side } = data;
  const [tokens, columns] = [data.u16("tokens"), data.u16("columns")];
  let group = 0;
  for (const run of side.runs)
    for (let start = 0; start < run; start += chunk, group++)
      for (let b = 0; b < side.batch; b++)
        if (tokens[b * side.groups + group] !== Math.min(chunk, run - start))
          badPayload("transform-8", `group ${group} has ${tokens[b * side.groups + group]} tokens`);
  if (columns.some((count) => count > dim)) badPayload("transform-9", `a block has more columns than ${dim}`);
  const segments = new Segments(data, view(data.u8("word_counts"), Uint32Array), "transform-10");
  return {
    segments,
    tokens,
    columns,
    positions: which === "k" ? view(data.u8("positions"), Uint32Array) : null,
  };
}
// Rotates a row to a position (basis.md, Rotary positions).
function turn({ frequencies, halves }, position, u) {
  const pairs = frequencies.length;
  for (let i = 0; i < pairs; i++) {
    const [a, b] = halves ? [i, i + pairs] : [2 * i, 2 * i + 1];
    const theta = position * frequencies[i];
    const [c, s] = [Math.cos(theta), Math.sin(theta)];
    [u[a], u[b]] = [u[a] * c - u[b] * s, u[b] * c + u[a] * s];
  }
}
const names = { group, minifloat, scalar, octahedral, quaternion, angle, polar, trellis, klt, transform };
export const DECODERS = { raw: plain("values"), opaque: plain("bytes"), lossless, ...names };
