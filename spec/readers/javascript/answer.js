// The program of readers/README.md: answers, for each line of its input, what this reader makes of a file.

import { open as openFile, readFile, writeFile } from "node:fs/promises";
import { createInterface } from "node:readline";
import { KvpackError, fromBytes, fromHandle, open, openBasis, verify } from "./kvpack.js";
import { concat, hex, sha256 } from "./numbers.js";
import { decodeRow, readRow } from "./row.js";

const bases = new Map();

async function basisOf(path) {
  if (!bases.has(path)) bases.set(path, await openBasis(fromBytes(new Uint8Array(await readFile(path)))));
  return bases.get(path);
}

function metadataEntries(metadata) {
  return [...(metadata ?? [])].map(([name, value]) => {
    if (typeof value === "string") return [name, "text", value];
    if (typeof value === "bigint") return [name, "integer", String(value)];
    const bits = new DataView(new ArrayBuffer(8));
    bits.setFloat64(0, value);
    return [name, "number", bits.getBigUint64(0).toString(16).padStart(16, "0")];
  });
}

async function facts(file) {
  const { starts, offsets, hidden, metadata, states } = file.header;
  const found = { starts, offsets, hidden, metadata_entries: metadataEntries(metadata), states: {} };
  for (const state of states) found.states[state.name] = hex(await sha256(await file.tensor(state)));
  return found;
}

async function answer(path, output, given) {
  if (path.endsWith(".row")) {
    const parts = decodeRow(readRow(new Uint8Array(await readFile(path))), given);
    await writeFile(output, concat(...parts.map((part) => new Uint8Array(part.buffer))));
    return {};
  }
  const handle = await openFile(path);
  try {
    const file = await open(await fromHandle(handle));
    const parts = [];
    await verify(file, {
      bases: given,
      values: (layer, side, { values }) => parts.push(new Uint8Array(values.buffer)),
    });
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
