// The page: what a file holds, as text and pictures. Everything that comes from a file is set as text, never
// as HTML.

const MAX_ROWS = 500;
const MAX_TOKENS = 2000;
const byId = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en-US");
const dark = matchMedia("(prefers-color-scheme: dark)");

let worker = null;
let waiting = new Map();
let last = 0;

// Each file has a worker of its own: what another one is busy with ends at once, and its memory is free.
function startWorker() {
  worker?.terminate();
  for (const { reject } of waiting.values()) reject(Object.assign(new Error("replaced"), { replaced: true }));
  waiting = new Map();
  worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data }) => {
    const { resolve, reject, progress } = waiting.get(data.id);
    if ("done" in data) return progress(data.done, data.total, data.name);
    waiting.delete(data.id);
    if ("error" in data) reject(Object.assign(new Error(data.error), { missing: data.missing }));
    else resolve(data.result);
  };
  worker.onerror = (event) =>
    fail(new Error(event.message || "the worker could not start; serve the page over HTTP"));
}

function ask(action, details = {}, progress = () => {}) {
  return new Promise((resolve, reject) => {
    const id = ++last;
    waiting.set(id, { resolve, reject, progress });
    worker.postMessage({ id, action, ...details });
  });
}

let summary = null;
let picture = null;
let tokenizer = null;
let tokensShown = 0;

// Control characters and those that turn the direction of text show as escapes.
function visible(text) {
  return String(text).replace(
    /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
    (one) => `\\u${one.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

function element(tag, content = null, properties = {}) {
  const result = Object.assign(document.createElement(tag), properties);
  if (Array.isArray(content)) result.append(...content);
  else if (content !== null) result.textContent = content;
  return result;
}

function bytes(count) {
  const units = ["bytes", "kB", "MB", "GB", "TB", "PB", "EB"];
  let power = 0;
  for (let left = count; left >= 1000 && power < units.length - 1; left /= 1000) power++;
  return power ? `${(count / 1000 ** power).toPrecision(4)} ${units[power]}` : `${count} bytes`;
}

const kindOf = (which) => (which === "k" ? "keys" : "values");
const counted = (count, noun) => `${number.format(count)} ${noun}${count === 1 ? "" : "s"}`;

function fail(error) {
  if (error.replaced) return;
  byId("error").textContent = visible(error.message);
  byId("error").hidden = false;
}

// A table of rows of cells; a cell is text, a number or an element. Longer tables get a button for more rows.
function table(headings, rows, caption) {
  const body = element("tbody");
  const numeric = headings.map(
    (_, i) => rows.length > 0 && rows.every((row) => typeof row[i] === "number" || row[i] === ""),
  );
  const cell = (value, i) => {
    if (value instanceof Node) return element("td", [value]);
    return element(i === 0 ? "th" : "td", typeof value === "number" ? number.format(value) : visible(value), {
      className: numeric[i] ? "number" : String(value).length > 40 ? "long" : "",
      ...(i === 0 ? { scope: "row" } : {}),
    });
  };
  const head = headings.map((text, i) =>
    element("th", text, { scope: "col", className: numeric[i] ? "number" : "" }),
  );
  const result = element("table", [
    element("caption", caption, { className: "caption" }),
    element("thead", [element("tr", head)]),
    body,
  ]);
  const parts = [result];
  let next = 0;
  const more = element("button", "", { type: "button" });
  const add = () => {
    body.append(...rows.slice(next, next + MAX_ROWS).map((row) => element("tr", row.map(cell))));
    next += MAX_ROWS;
    more.textContent = `Show more rows (${number.format(rows.length - next)} left)`;
    more.hidden = next >= rows.length;
  };
  add();
  more.addEventListener("click", add);
  if (!more.hidden) parts.push(more);
  return parts;
}

function showHeader() {
  const list = byId("header");
  const item = (name, value) => list.append(element("dt", visible(name)), element("dd", visible(value)));
  list.replaceChildren();
  item("File", summary.name);
  item("Size", `${number.format(summary.size)} bytes (${bytes(summary.size)})`);
  item("Kind", summary.isBasis ? "basis" : "cache");
  item("Positions", `${number.format(summary.start)} to ${number.format(summary.end)}`);
  item("Recipe", summary.recipe || "none");
  for (const [name, value] of summary.model) item(`Model: ${name}`, value);
  item("Required features", summary.required.join(", ") || "none");
  item(
    "Other features",
    summary.ignorable.map(([name, size]) => `${name} (${bytes(size)})`).join(", ") || "none",
  );
  for (const [name, value] of summary.metadata ?? []) item(`Metadata: ${name}`, value);
  if (summary.hidden) item("Hidden stretches", number.format(summary.hidden));
  if (summary.offsets) item("Position offsets", summary.offsets.join(", "));
  if (summary.bases.length) item("Needs the bases", summary.bases.join(", "));
  item("Tensors", number.format(summary.tensors));
  if (summary.states) item("States", number.format(summary.states));
}

function sideCells(side) {
  if (!side) return ["none", "", "", "", "", ""];
  const values = side.batch * side.heads * side.length * side.dim;
  const bits = values ? Number(((8 * side.stored) / values).toFixed(3)) : "";
  return [side.codec, side.heads, side.dim, side.length, side.stored, bits];
}

function showLayers() {
  const rows = summary.layers.flatMap((layer, i) =>
    ["k", "v"].map((which) => [
      `${i} ${which === "k" ? "keys" : "values"}`,
      summary.starts[i],
      ...sideCells(layer[which]),
    ]),
  );
  const headings = ["Layer", "Start", "Codec", "Heads", "Head dim", "Tokens", "Bytes", "Bits per value"];
  byId("layers").replaceChildren(...table(headings, rows, "Sides of each layer"));
}

function showStreams() {
  const most = Math.max(1, ...summary.streams.map(([, size]) => size));
  const rows = summary.streams.map(([name, size]) => {
    const bar = element("div");
    bar.style.width = `${(100 * size) / most}%`;
    const track = element("div", [bar], { className: "track" });
    return [name, size, `${((100 * size) / summary.size).toFixed(2)} %`, track];
  });
  byId("streams").replaceChildren(
    ...table(["Stream", "Bytes", "Share", "Picture"], rows, "Stored bytes of all layers"),
  );
}

async function openFile(details) {
  byId("error").hidden = true;
  byId("contents").hidden = true;
  for (const id of ["values", "verify-table"]) byId(id).hidden = true;
  for (const id of ["verify-status", "values-status"]) byId(id).textContent = "";
  picture = null;
  byId("status").textContent = "Opening the file.";
  for (const id of ["basis", "tokenizer"]) byId(id).disabled = true;
  startWorker();
  try {
    summary = await ask("open", details);
  } catch (error) {
    if (error.replaced) return;
    byId("status").textContent = "The file is refused.";
    return fail(error);
  }
  byId("status").textContent =
    `${visible(summary.name)}: ${bytes(summary.size)}, ${counted(summary.layers.length, "layer")}.`;
  document.title = `${visible(summary.name)} - kvpack viewer`;
  showHeader();
  showLayers();
  showStreams();
  byId("layer").max = Math.max(0, summary.layers.length - 1);
  for (const id of ["basis", "tokenizer"]) byId(id).disabled = false;
  byId("contents").hidden = false;
  if (tokenizer) useTokenizer();
  else showTokens();
}

async function verify() {
  const progress = byId("verify-progress");
  byId("verify").disabled = true;
  progress.hidden = false;
  progress.value = 0;
  try {
    const result = await ask("verify", {}, (done, total, name) => {
      progress.value = done / total;
      byId("verify-status").textContent = `Checking ${visible(name)}.`;
    });
    const rows = result.tensors.map(([name, size, problem]) => [name, size, problem ?? "matches its digest"]);
    byId("verify-table").replaceChildren(...table(["Tensor", "Bytes", "Result"], rows, "Checked tensors"));
    byId("verify-table").hidden = false;
    const missing = result.missing
      ? ` ${counted(result.missing, "side")} not decoded for lack of a basis.`
      : "";
    const large = result.large ? ` ${counted(result.large, "side")} not decoded for lack of memory.` : "";
    byId("verify-status").textContent = result.refused
      ? `Damaged or invalid: ${number.format(result.refused)} of ${counted(result.checked, "check")} failed.`
      : `${counted(result.checked, "tensor")} checked: the file is intact.${missing}${large}`;
    byId("verify-status").className = result.refused ? "bad" : "good";
  } catch (error) {
    byId("verify-status").textContent = error.replaced ? "" : visible(error.message);
    byId("verify-status").className = "bad";
  }
  progress.hidden = true;
  byId("verify").disabled = false;
}

async function showValues() {
  const [layer, sequence] = [Number(byId("layer").value), Number(byId("sequence").value)];
  const which = byId("side").value;
  byId("show").disabled = true;
  byId("values-progress").hidden = false;
  byId("values-status").textContent = "Decoding.";
  try {
    picture = await ask("show", { layer, which, sequence });
    const { heads, length, dim } = picture;
    byId("values-status").textContent =
      `Layer ${layer}, ${kindOf(which)}: ${counted(length, "token")}, ` +
      `${counted(heads, "head")} of ${dim} channels.`;
    byId("values").hidden = false;
    byId("token").max = Math.max(0, length - 1);
    byId("head").max = heads - 1;
    byId("channel").max = dim - 1;
    draw();
    showStatistics();
    showCell();
  } catch (error) {
    byId("values").hidden = true;
    const hint = error.missing ? " Choose the basis file above." : "";
    byId("values-status").textContent = error.replaced ? "" : visible(error.message) + hint;
  }
  byId("values-progress").hidden = true;
  byId("show").disabled = false;
}

// From -1 (blue) over 0 (the ground) to 1 (red).
function color(share, isDark) {
  const size = Math.min(1, Math.abs(share)) ** 0.6;
  const ground = isDark ? [20, 23, 26] : [255, 255, 255];
  const end = share < 0 ? (isDark ? [90, 170, 255] : [20, 70, 170]) : isDark ? [255, 120, 90] : [178, 24, 43];
  return ground.map((value, i) => value + (end[i] - value) * size);
}

function draw() {
  if (!picture) return;
  const { rows, columns, reach, heads, length, dim } = picture;
  const canvas = byId("picture");
  canvas.width = Math.max(1, columns);
  canvas.height = Math.max(1, rows);
  canvas.style.width = `${Math.max(columns, Math.min(1000, 12 * columns))}px`;
  canvas.style.height = `${Math.max(rows, Math.min(400, 8 * rows))}px`;
  const context = canvas.getContext("2d");
  if (rows && columns) {
    const image = context.createImageData(columns, rows);
    for (let i = 0; i < rows * columns; i++) {
      const [r, g, b] = color(picture.picture[i] / reach, dark.matches);
      image.data.set([r, g, b, 255], 4 * i);
    }
    context.putImageData(image, 0, 0);
  }
  const perRow = Math.max(1, length / Math.max(rows, 1));
  byId("picture-text").textContent =
    `Tokens from top to bottom, ${counted(heads, "head")} of ${dim} channels from left to right. ` +
    `Blue is negative, red is positive, full color is ${reach.toPrecision(3)} or more. ` +
    (perRow > 1 || columns < heads * dim ? "A point shows the value of largest magnitude in its place." : "");
  drawHistogram();
}

function drawHistogram() {
  const canvas = byId("histogram");
  const { bins, reach } = picture;
  const [width, height] = [canvas.clientWidth || 600, canvas.clientHeight || 160];
  const scale = devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const most = Math.max(1, ...bins);
  context.fillStyle = style.getPropertyValue("--bar");
  bins.forEach((count, i) => {
    const tall = (count / most) * (height - 24);
    context.fillRect(
      (i * width) / bins.length,
      height - 20 - tall,
      Math.max(1, width / bins.length - 1),
      tall,
    );
  });
  context.fillStyle = style.getPropertyValue("--text");
  context.font = "12px system-ui, sans-serif";
  [-reach, 0, reach].forEach((value, i) => {
    context.textAlign = ["left", "center", "right"][i];
    context.fillText(value.toPrecision(3), (i * width) / 2, height - 5);
  });
}

function showStatistics() {
  const { stats, mean, rms, quantiles, bins, reach } = picture;
  const shownNumber = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(6))) : "none");
  const rows = [
    ["values", number.format(stats.count + stats.notFinite)],
    ["not finite", number.format(stats.notFinite)],
    ["zero", number.format(stats.zeros)],
    ["minimum", shownNumber(stats.min)],
    ["1st percentile", shownNumber(quantiles[0])],
    ["median", shownNumber(quantiles[1])],
    ["99th percentile", shownNumber(quantiles[2])],
    ["maximum", shownNumber(stats.max)],
    ["mean", shownNumber(mean)],
    ["root mean square", shownNumber(rms)],
  ];
  byId("statistics").replaceChildren(
    ...table(["Statistic", "Value"], rows, "Statistics of the shown values"),
  );
  const top = bins.indexOf(Math.max(...bins));
  const center = ((2 * top + 1) / bins.length - 1) * reach;
  byId("histogram").setAttribute(
    "aria-label",
    `Histogram from ${shownNumber(-reach)} to ${shownNumber(reach)}, highest near ${shownNumber(center)}`,
  );
  const { layer, which, length, heads, dim } = picture;
  byId("picture").setAttribute(
    "aria-label",
    `Heat map of the ${kindOf(which)} of layer ${layer}: ${length} tokens, ${heads * dim} channels`,
  );
}

async function showCell() {
  const [token, head, channel] = ["token", "head", "channel"].map((id) => Number(byId(id).value));
  byId("value").textContent = "";
  const { value, text } = await ask("value", { token, head, channel });
  const named = text === null ? "" : ` (${JSON.stringify(visible(text))})`;
  const found = value === null ? "no value" : Number(value.toPrecision(8));
  byId("value").textContent = `Token ${token}${named}, head ${head}, channel ${channel}: ${found}`;
}

// A point of the picture chooses the value below it.
function choosePoint(event) {
  if (!picture || !picture.rows) return;
  const box = event.target.getBoundingClientRect();
  const place = (offset, size, count) =>
    Math.min(count - 1, Math.max(0, Math.floor((offset / size) * count)));
  const column = place(event.clientX - box.left, box.width, picture.heads * picture.dim);
  byId("token").value = place(event.clientY - box.top, box.height, picture.length);
  byId("head").value = Math.floor(column / picture.dim);
  byId("channel").value = column % picture.dim;
  showCell();
}

async function useTokenizer() {
  try {
    await ask("tokenizer", { blob: tokenizer });
  } catch (error) {
    const { name } = tokenizer;
    tokenizer = null;
    if (!error.replaced) fail(new Error(`${name}: ${error.message}`));
  }
  showTokens();
}

function showTokens() {
  byId("tokens").replaceChildren();
  byId("tokens").hidden = summary.ids === 0;
  tokensShown = 0;
  byId("tokens-status").textContent = summary.ids
    ? counted(summary.ids, "token id") +
      (tokenizer ? "." : ". Choose a tokenizer.json above to see them as text.")
    : "The file has no token ids.";
  return moreTokens();
}

async function moreTokens() {
  const from = tokensShown;
  tokensShown = Math.min(summary.ids, from + MAX_TOKENS);
  const { ids, texts } = await ask("tokens", { from, count: tokensShown - from });
  byId("tokens").append(
    ...ids.map((id, i) => {
      const text = texts ? visible(texts[i]).replaceAll("\\u000a", "⏎\n") : `${id} `;
      return element("span", text, { title: `${from + i}: ${id}` });
    }),
  );
  byId("more-tokens").hidden = tokensShown >= summary.ids;
}

// A file that has changed can be chosen again only if the input has none.
for (const id of ["file", "basis", "tokenizer"])
  byId(id).addEventListener("click", ({ target }) => (target.value = ""));
byId("file").addEventListener("change", ({ target }) => {
  if (target.files[0]) openFile({ blob: target.files[0], name: target.files[0].name });
});
byId("basis").addEventListener("change", async ({ target }) => {
  try {
    const left = await ask("bases", { blobs: [...target.files] });
    byId("values-status").textContent = left.length
      ? `The file also needs ${left.join(", ")}.`
      : "The file has all bases that it needs.";
  } catch (error) {
    fail(error);
  }
});
byId("tokenizer").addEventListener("change", ({ target }) => {
  if (!target.files[0]) return;
  byId("error").hidden = true;
  byId("tokens-status").textContent = "Reading the tokenizer.";
  tokenizer = target.files[0];
  useTokenizer();
});
byId("verify").addEventListener("click", verify);
byId("pick").addEventListener("submit", (event) => {
  event.preventDefault();
  showValues();
});
byId("cell").addEventListener("input", showCell);
byId("cell").addEventListener("submit", (event) => event.preventDefault());
byId("choose").addEventListener("submit", (event) => event.preventDefault());
byId("picture").addEventListener("click", choosePoint);
byId("more-tokens").addEventListener("click", moreTokens);
dark.addEventListener("change", draw);
addEventListener("resize", () => picture && drawHistogram());
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => {
  event.preventDefault();
  const [dropped] = event.dataTransfer.files;
  if (dropped) openFile({ blob: dropped, name: dropped.name });
});

// Promises that nobody waits for end here: those of a worker that another file has replaced, and faults.
addEventListener("unhandledrejection", (event) => {
  event.preventDefault();
  fail(event.reason);
});

// `kvpack view` names the file that it serves in the fragment.
if (location.hash.startsWith("#file=")) {
  const name = location.hash.slice("#file=".length).replace(/(%[0-9A-F]{2})+/gi, (part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  openFile({ url: new URL("../file", location.href).href.split("#")[0], name });
}
