// Reads, checks and decodes files off the page's thread. Each message { id, action, ... } is answered by {
// id, result } or { id, error }; { id, done, total } may come before.

import { KvpackError, fromBlob, loadBasis, open } from "../readers/javascript/kvpack.js";
import { readTokenizer } from "./tokens.js";

const MAX_ROWS = 512;
const MAX_COLUMNS = 2048;
const BINS = 101;
const MAX_LISTED = 4096;
const MAX_VALUES = 2 ** 27;
// Bytes of a tensor, and of all tensors of a side, that are held in memory at once.
const MAX_TENSOR_BYTES = 2 ** 30;
const MAX_SIDE_BYTES = 2 ** 31;
// As many earlier tokens as may hold the first bytes of a character.
const CONTEXT = 8;

let file = null;
let bases = new Map();
let ids = new Uint32Array(0);
// A function from token ids to their texts, once a tokenizer is given.
let textsOf = null;
// The values that are shown: { side, sequence, values }.
let shown = null;

const short = (text) => (text.length > 500 ? `${text.slice(0, 500)}…` : text);
const entries = (map) =>
  [...map].map(([name, value]) => [name, typeof value === "string" ? value : String(value)]);

function sideSummary(side) {
  if (!side) return null;
  const stored = side.streams.reduce((sum, stream) => sum + Number(stream.stored), 0);
  const { codec, batch, heads, dim, length, packed, tail, runs } = side;
  return { codec: codec.id, batch, heads, dim, length, packed, tail, runs: runs.length, stored };
}

// A file behind a URL whose server knows ranges. Errors do not name the URL, which may be secret.
async function fromUrl(url) {
  const ask = async (status, options) => {
    const lost = () => Promise.reject(new Error("the server has ended, or the file was cut short meanwhile"));
    const response = await fetch(url, { ...options, cache: "no-store" }).catch(lost);
    if (response.status !== status) throw new Error(`the server answers ${response.status}, not ${status}`);
    const bytes = new Uint8Array(await response.arrayBuffer().catch(lost));
    return { bytes, size: Number(response.headers.get("Content-Length")) };
  };
  const read = async (from, to) => {
    if (from === to) return new Uint8Array(0);
    return (await ask(206, { headers: { Range: `bytes=${from}-${to - 1}` } })).bytes;
  };
  return { size: (await ask(200, { method: "HEAD" })).size, read };
}

// The stored bytes by side and stream, planes of one stream together.
function streamTotals() {
  const totals = new Map();
  const add = (name, stored) => totals.set(name, (totals.get(name) ?? 0) + Number(stored));
  for (const { k, v } of file.layers)
    for (const side of [k, v].filter(Boolean))
      for (const { stream, stored } of side.streams)
        add(`${side.which === "k" ? "keys" : "values"}: ${stream.replace(/\.\d+$/, "")}`, stored);
  for (const state of file.header.states) add(`states: ${state.key}`, state.stored);
  const tensors = [...totals.values()].reduce((sum, bytes) => sum + bytes, 0);
  totals.set("header and padding", file.source.size - tensors);
  return [...totals].sort((a, b) => b[1] - a[1]);
}

function summary(name) {
  const { header } = file;
  return {
    name,
    size: file.source.size,
    isBasis: file.isBasis,
    recipe: header.recipe,
    start: header.start,
    end: header.end,
    model: entries(header.model),
    required: header.required,
    ignorable: [...header.ignorable].map(([feature, bytes]) => [feature, bytes.length]),
    metadata: header.metadata ? entries(header.metadata) : null,
    hidden: header.hidden.length,
    offsets: header.offsets?.slice(0, 16) ?? null,
    tensors: header.tensors.length,
    states: header.states.length,
    starts: header.starts,
    bases: file.basisDigests,
    layers: file.layers.map(({ k, v }) => ({ k: sideSummary(k), v: sideSummary(v) })),
    streams: streamTotals(),
    ids: ids.length,
  };
}

async function openFile({ blob, url, name }) {
  file = null;
  shown = null;
  bases = new Map();
  file = await open(blob ? fromBlob(blob) : await fromUrl(url), { limit: MAX_TENSOR_BYTES });
  const known = file.tokenIds();
  ids = known?.sequences ? known.row(0) : new Uint32Array(0);
  return summary(name);
}

async function useTokenizer({ blob }) {
  textsOf = await readTokenizer(blob);
}

// The ids of tokens and, by the tokenizer, their texts.
function tokens({ from, count }) {
  const first = Math.max(0, from - CONTEXT);
  const all = [...ids.subarray(first, from + count)];
  const texts = textsOf?.(all).slice(from - first) ?? null;
  return { ids: all.slice(from - first), texts };
}

async function addBases({ blobs }) {
  for (const blob of blobs) {
    const other = await open(fromBlob(blob), { limit: MAX_TENSOR_BYTES });
    if (!other.isBasis) throw new KvpackError("InvalidHeader", "basis-18", "the file is not a basis");
    const basis = await loadBasis(other);
    bases.set(basis.digest, basis);
  }
  return file.basisDigests.filter((digest) => !bases.has(digest));
}

// Tensors one by one, then what the codecs say of them. Lists at most MAX_LISTED tensors, but all that are
// refused.
async function verifyFile(message, progress) {
  const total = file.header.tensors.reduce((sum, tensor) => sum + Number(tensor.stored), 0) || 1;
  const result = { tensors: [], checked: 0, refused: 0, missing: 0, large: 0 };
  let done = 0;
  const list = (name, bytes, problem) => {
    result.checked++;
    if (problem) result.refused++;
    if (problem || result.tensors.length < MAX_LISTED) result.tensors.push([name, bytes, problem]);
  };
  for (const tensor of file.header.tensors) {
    let problem = null;
    try {
      await file.checkTensor(tensor, (bytes) => progress((done += bytes), 2 * total, tensor.name));
    } catch (error) {
      problem = refusal(error);
    }
    list(tensor.name, Number(tensor.stored), problem);
  }
  if (result.refused) return result;
  done = total;
  if (file.isBasis) await loadBasis(file).catch((error) => list("basis", file.source.size, refusal(error)));
  for (const [layer, sides] of file.layers.entries())
    for (const which of ["k", "v"]) {
      if (!sides[which]) continue;
      try {
        await eachPart(layer, which, null, () => {});
      } catch (error) {
        // What this browser has no memory for is not wrong.
        if (error.kind === "MissingBasis") result.missing++;
        else if (error.kind === "LimitExceeded" || error instanceof RangeError) result.large++;
        else list(`${layer}.${which}`, 0, refusal(error));
      }
      done += sides[which].streams.reduce((sum, stream) => sum + Number(stream.stored), 0);
      progress(done, 2 * total, `${layer}.${which}`);
    }
  return result;
}

// Decode a side in parts of at most MAX_VALUES values: visit(values, heads, tokens). Returns the number of
// parts.
async function eachPart(layer, which, sequence, visit) {
  const side = file.layers[layer][which];
  const bytes = side.streams.reduce((sum, stream) => sum + Number(stream.size), 0);
  if (bytes > MAX_SIDE_BYTES)
    throw new KvpackError("LimitExceeded", "container-29", `the side takes ${bytes} bytes in memory`);
  const streams = await file.streams(layer, which);
  const { heads, length, dim } = side;
  const [first, last] = sequence === null ? [0, side.batch] : [sequence, sequence + 1];
  if (length === 0) {
    await file.decode(layer, which, { bases, streams, batch: [0, 1], heads: [0, 1] });
    return 0;
  }
  // As many sequences as fit, else as many heads of one, else as many tokens of one head.
  const most = (count, size) => Math.max(1, Math.min(count, Math.floor(MAX_VALUES / size)));
  const steps = [most(last - first, heads * length * dim), most(heads, length * dim), most(length, dim)];
  let parts = 0;
  for (let b = first; b < last; b += steps[0])
    for (let h = 0; h < heads; h += steps[1])
      for (let t = 0; t < length; t += steps[2]) {
        const range = {
          batch: [b, Math.min(b + steps[0], last)],
          heads: [h, Math.min(h + steps[1], heads)],
          tokens: [t, Math.min(t + steps[2], length)],
        };
        const { values } = await file.decode(layer, which, { bases, streams, ...range });
        visit(values, range.heads, range.tokens);
        parts++;
      }
  return parts;
}

async function showSide({ layer, which, sequence }) {
  const side = file.layers[layer]?.[which];
  if (!side) throw new Error(`layer ${layer} has no ${which === "k" ? "keys" : "values"}`);
  if (!(Number.isInteger(sequence) && sequence >= 0 && sequence < side.batch))
    throw new Error(`there are ${side.batch} sequences, counted from 0`);
  shown = null;
  const { heads, length, dim } = side;
  const start = file.header.starts[layer];
  const width = heads * dim;
  const rows = Math.min(length, MAX_ROWS);
  const columns = Math.min(width, MAX_COLUMNS);
  const picture = new Float32Array(rows * columns);
  const stats = { count: 0, notFinite: 0, zeros: 0, min: Infinity, max: -Infinity, sum: 0, squares: 0 };
  let only = null;
  const parts = await eachPart(layer, which, sequence, (values, [from, to], [first, last]) => {
    addPart(values, { from, to, first, last, dim, length, width }, { picture, rows, columns }, stats);
    only = values;
  });
  const mean = stats.count ? stats.sum / stats.count : 0;
  const rms = stats.count ? Math.sqrt(stats.squares / stats.count) : 0;
  const reach = Math.min(Math.max(Math.abs(stats.min), Math.abs(stats.max), 1e-30), 6 * rms || 1);
  const counts = { fine: new Float64Array(4096), bins: new Float64Array(BINS) };
  if (parts === 1) {
    count(only, reach, counts);
    // One part has the values in the order [head, token, channel].
    shown = { heads, length, dim, values: only, start };
  } else if (parts > 1) {
    // All values together may not fit in memory, so they are decoded again.
    only = null;
    await eachPart(layer, which, sequence, (values) => count(values, reach, counts));
  }
  const { bins } = counts;
  const quantiles = quantilesOf(counts.fine, reach, stats.count);
  return {
    layer,
    which,
    sequence,
    heads,
    length,
    dim,
    start,
    picture,
    rows,
    columns,
    stats,
    mean,
    rms,
    reach,
    bins,
    quantiles,
  };
}

// Add the largest magnitude, with its sign, of each cell of the picture, and sums over all values.
function addPart(values, { from, to, first, last, dim, length, width }, { picture, rows, columns }, stats) {
  const cells = new Int32Array(dim);
  let at = 0;
  for (let h = from; h < to; h++) {
    for (let c = 0; c < dim; c++) cells[c] = Math.floor(((h * dim + c) * columns) / width);
    for (let t = first; t < last; t++) {
      const row = Math.floor((t * rows) / length) * columns;
      for (let c = 0; c < dim; c++) {
        const value = values[at++];
        if (!(Math.abs(value) < Infinity)) {
          stats.notFinite++;
          continue;
        }
        stats.count++;
        stats.sum += value;
        stats.squares += value * value;
        if (value === 0) stats.zeros++;
        if (value < stats.min) stats.min = value;
        if (value > stats.max) stats.max = value;
        const cell = row + cells[c];
        if (Math.abs(value) > Math.abs(picture[cell])) picture[cell] = value;
      }
    }
  }
}

// Count values in equal steps from -reach to reach, those beyond them at the ends: 4,096 fine steps, and BINS
// steps.
function count(values, reach, { fine, bins }) {
  for (let i = 0; i < values.length; i++) {
    if (!(Math.abs(values[i]) < Infinity)) continue;
    const place = (values[i] / reach + 1) / 2;
    const clamped = place < 0 ? 0 : place >= 1 ? 1 - 2 ** -20 : place;
    fine[Math.floor(clamped * 4096)]++;
    bins[Math.floor(clamped * BINS)]++;
  }
}

function quantilesOf(fine, reach, total) {
  return [0.01, 0.5, 0.99].map((share) => {
    let sum = 0;
    for (let i = 0; i < 4096; i++)
      if ((sum += fine[i]) >= share * total) return ((i + 0.5) / 2048 - 1) * reach;
    return 0;
  });
}

// A value of the side that is shown, null without it, and the text of its token.
function valueAt({ head, token, channel }) {
  if (!shown) return { value: null, text: null };
  const { heads, length, dim, values, start } = shown;
  const inside = (index, count) => Number.isInteger(index) && index >= 0 && index < count;
  if (!inside(head, heads) || !inside(token, length) || !inside(channel, dim))
    return { value: null, text: null };
  // Ids count from the start of the file.
  const text = start === file.header.start ? (tokens({ from: token, count: 1 }).texts?.[0] ?? null) : null;
  return { value: values[(head * length + token) * dim + channel], text };
}

function refusal(error) {
  if (error instanceof KvpackError) return `${error.kind}: ${short(error.message)}`;
  if (error.name === "NotReadableError" || error.name === "NotFoundError")
    return "The file has changed since it was chosen, or cannot be read: choose it again.";
  if (error instanceof RangeError) return `This browser has too little memory: ${short(error.message)}`;
  return short(`${error.name}: ${error.message}`);
}

const ACTIONS = {
  open: openFile,
  bases: addBases,
  tokenizer: useTokenizer,
  tokens,
  verify: verifyFile,
  show: showSide,
  value: valueAt,
};

// One action at a time: each uses what the one before it has left.
let queue = Promise.resolve();

self.onmessage = ({ data }) => {
  let last = 0;
  const progress = (done, total, name) => {
    if (Date.now() - last < 50) return;
    last = Date.now();
    self.postMessage({ id: data.id, done, total, name });
  };
  queue = queue.then(async () => {
    try {
      self.postMessage({ id: data.id, result: await ACTIONS[data.action](data, progress) });
    } catch (error) {
      self.postMessage({ id: data.id, error: refusal(error), missing: error.kind === "MissingBasis" });
    }
  });
};
