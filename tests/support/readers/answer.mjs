// The program of spec/readers/README.md: answers each line of its input with what the reader makes of a file.

import { readFile, writeFile } from "node:fs/promises";
import { createInterface } from "node:readline";
import { KvpackError, fromBytes, open, openBasis, verify } from "../../../spec/readers/javascript/kvpack.js";
import { concat, hex, sha256 } from "../../../spec/readers/javascript/numbers.js";
import { decodeRow, readRow, rowEntryKey } from "../../../spec/readers/javascript/row.js";
import { decryptEntry, openChunk, openStates } from "../../../spec/readers/javascript/store.js";

const MAX_TOKEN_IDS = 2 ** 26;
const bytesOf = ({ buffer, byteOffset, byteLength }) => new Uint8Array(buffer, byteOffset, byteLength);
const bases = new Map();

async function basisOf(path) {
  if (!bases.has(path)) bases.set(path, await openBasis(fromBytes(new Uint8Array(await readFile(path)))));
  return bases.get(path);
}

function metadataEntry([name, value]) {
  if (typeof value === "string") return [name, "text", value];
  if (typeof value === "bigint") return [name, "integer", String(value)];
  const bits = new BigUint64Array(Float64Array.of(value).buffer)[0];
  return [name, "number", bits.toString(16).padStart(16, "0")];
}

async function facts(file) {
  const { starts, offsets, hidden, metadata, states, ignorable } = file.header;
  const found = {
    starts,
    offsets,
    hidden,
    metadata_entries: [...(metadata ?? [])].map(metadataEntry),
    states: {},
  };
  for (const state of states) found.states[state.name] = hex(await sha256(await file.tensor(state)));
  const ids = file.tokenIds();
  if (ids && ids.sequences * ids.length <= MAX_TOKEN_IDS) {
    const rows = Array.from({ length: ids.sequences }, (_, i) => bytesOf(ids.row(i)));
    found.token_ids_sha256 = hex(await sha256(concat(...rows)));
  }
  if (ignorable.has("inputs"))
    found.undetermined = ids.undetermined?.map(([position, text]) => [String(position), text]) ?? null;
  return found;
}

async function answerRow(row, output, given) {
  await writeFile(output, concat(...decodeRow(row, given).map(bytesOf)));
  return {};
}

async function answerFile(file, output, bases) {
  const parts = [];
  const values = (layer, side, decoded) => parts.push(bytesOf(decoded.values));
  await verify(file, { bases, values });
  await writeFile(output, concat(...parts));
  return await facts(file);
}

const absent = (kind, message) => {
  throw new KvpackError(kind, "store-5", message);
};

// Answer for an entry of a store, by the fields NAME=VALUE of what is asked for.
async function answerEntry(entry, output, fields) {
  const wanted = new Map(fields.map((field) => /^([^=]*)=(.*)$/s.exec(field).slice(1)));
  const bytesAt = (name) => (wanted.has(name) ? new Uint8Array(Buffer.from(wanted.get(name), "hex")) : null);
  const named = (prefix, read) =>
    [...wanted.keys()]
      .filter((name) => name.startsWith(prefix))
      .map((name) => [name.slice(prefix.length), read(name)]);
  const secrets = new Map(named("secret.", bytesAt));
  const identity = named("identity.", (name) => wanted.get(name));
  const [key, parent] = [bytesAt("key"), bytesAt("parent")];
  let bytes = entry;
  if (secrets.size || Buffer.from(entry).toString("latin1", 0, 17) === "kvpack-encrypted ")
    bytes = await decryptEntry(entry, secrets, key, wanted.get("tenant") ?? "");
  if (!bytes) absent("Undecryptable", "no key at hand opens the entry");
  if (Buffer.from(bytes).toString("latin1", 0, 11) === "kvpack-row ") {
    const row = readRow(bytes);
    if ((await rowEntryKey(row)) !== hex(key))
      throw new KvpackError("InvalidHeader", "row-7", "another entry key");
    return answerRow(row, output, new Map());
  }
  const expected = {
    identity: identity.length ? Object.fromEntries(identity) : null,
    start: Number(wanted.get("start") ?? 0),
  };
  const opened = await (wanted.has("states")
    ? openStates(bytes, parent, expected)
    : openChunk(bytes, key, { ...expected, parent }));
  if (!opened) absent("LimitExceeded", `the entry has ${bytes.length} bytes`);
  return answerFile(opened.file, output, new Map());
}

async function answer(path, output, rest) {
  if (path.endsWith(".entry")) return answerEntry(new Uint8Array(await readFile(path)), output, rest);
  const given = new Map();
  for (const basis of await Promise.all(rest.map(basisOf))) given.set(basis.digest, basis);
  if (path.endsWith(".row")) return answerRow(readRow(new Uint8Array(await readFile(path))), output, given);
  return answerFile(await open(fromBytes(new Uint8Array(await readFile(path)))), output, given);
}

for await (const line of createInterface({ input: process.stdin })) {
  const [path, output, ...rest] = line.split("\t");
  try {
    console.log(`ok\t${JSON.stringify(await answer(path, output, rest))}`);
  } catch (error) {
    if (!(error instanceof KvpackError)) throw error;
    console.log(`${error.kind}\t${error.rule}\t${JSON.stringify(error.message)}`);
  }
}
