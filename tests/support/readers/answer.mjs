// The program of spec/readers/README.md: answers each line of its input with what the reader makes of a file.

import { open as openFile, readFile, writeFile } from "node:fs/promises";
import { createInterface } from "node:readline";
import {
  KvpackError,
  fromBytes,
  fromHandle,
  open,
  openBasis,
  verify,
} from "../../../spec/readers/javascript/kvpack.js";
import { concat, hex, sha256 } from "../../../spec/readers/javascript/numbers.js";
import { decodeRow, readRow } from "../../../spec/readers/javascript/row.js";

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

async function answer(path, output, given) {
  if (path.endsWith(".row")) {
    const parts = decodeRow(readRow(new Uint8Array(await readFile(path))), given);
    await writeFile(output, concat(...parts.map(bytesOf)));
    return {};
  }
  const handle = await openFile(path);
  try {
    const file = await open(await fromHandle(handle));
    const parts = [];
    const values = (layer, side, decoded) => parts.push(bytesOf(decoded.values));
    await verify(file, { bases: given, values });
    await writeFile(output, concat(...parts));
    return await facts(file);
  } finally {
    await handle.close();
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const [path, output, ...paths] = line.split("\t");
  try {
    const given = new Map();
    for (const basis of await Promise.all(paths.map(basisOf))) given.set(basis.digest, basis);
    console.log(`ok\t${JSON.stringify(await answer(path, output, given))}`);
  } catch (error) {
    if (!(error instanceof KvpackError)) throw error;
    console.log(`${error.kind}\t${error.rule}\t${JSON.stringify(error.message)}`);
  }
}
