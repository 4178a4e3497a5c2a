// Keys and entries of prefix stores (store.md). Where the text says that an entry is as if it were absent,
// functions return null; damaged ones are refused.
import { KvpackError, badHeader, digestMismatch, need, notKvpack, unsupported } from "./errors.js";
import { sidesOf } from "./header.js";
import { fromBytes, open } from "./kvpack.js";
import { concat, equalBytes, sha256, subtle, view } from "./numbers.js";
import { xxh3 } from "./xxhash.js";

const FIELDS = ["model", "recipe", "weights", "adapter", "rope", "dtype", "tenant", "config", "extra"];
const ascii = (text) => new TextEncoder().encode(text);
// UTF-8, with each lone surrogate encoded as if it were a character.
function encodeText(text) {
  const encode = (character) => {
    const point = character.codePointAt(0);
    if (point < 0xd800 || point >= 0xe000) return ascii(character);
    return Uint8Array.of(0xe0 | (point >> 12), 0x80 | ((point >> 6) & 63), 0x80 | (point & 63));
  };
  return concat(...Array.from(text, encode));
}
export const lengthPrefixed = (bytes) =>
  concat(new Uint8Array(BigUint64Array.of(BigInt(bytes.length)).buffer), bytes);
const keyOf = (...parts) => sha256(concat(...parts.map(lengthPrefixed)));
// The root of an identity: its fields by name, "" for those that are left out.
export function rootKey(fields) {
  const pairs = [["format", "1"], ...FIELDS.map((name) => [name, fields[name] ?? ""])];
  return keyOf(...pairs.flatMap(([name, value]) => [ascii(name), encodeText(value)]));
}

export function chunkKey(parent, ids, inputs = new Uint8Array(0)) {
  const bytes = new Uint8Array(Uint32Array.from(ids).buffer);
  return keyOf(parent, bytes, ...(inputs.length ? [inputs] : []));
}
// S(x): the root of models that keep states, or the key of the states after a chunk.
export const statesKey = (key) => keyOf(ascii("kvpack-states 1"), key);
// The key of a basis by the SHA-256 of its file; `encryption`: { id, tenant } where entries are encrypted.
export async function basisKey(digest, encryption = null) {
  if (!encryption) return digest;
  return keyOf(ascii("kvpack-basis 1"), digest, ascii(encryption.id), encodeText(encryption.tenant));
}
const HEAD = "kvpack-encrypted ";
const damaged = (what) => digestMismatch("store-31", `the encrypted entry ${what}`);
// The kvpack file in an entry, or null where no key opens it. `keys`: Map from the id of a key to its bytes.
export async function decryptEntry(bytes, keys, entryKey, tenant = "") {
  const start = String.fromCharCode(...bytes.subarray(0, 40));
  const match = /^kvpack-encrypted ([1-9][0-9]*)\n/.exec(start);
  if (match && match[1] !== "1") unsupported("store-5", `the entry is of version ${match[1]}`);
  if (!match) notKvpack("store-5", "the entry is not encrypted");
  const [head, end] = [HEAD.length + 2, bytes.length - 16];
  const nonce = head + 1 + bytes[head];
  if (!(nonce + 12 + 16 <= end)) damaged("is too short");
  if (!equalBytes(xxh3(bytes.subarray(0, end)), bytes.subarray(end))) damaged("does not have its digest");
  const id = new TextDecoder().decode(bytes.subarray(head + 1, nonce));
  if (!keys.has(id)) return null;
  const parts = [bytes.subarray(0, nonce), entryKey, encodeText(tenant)];
  const additionalData = concat(...parts.map(lengthPrefixed));
  const key = await subtle.importKey("raw", keys.get(id), "AES-GCM", false, ["decrypt"]);
  const parameters = { name: "AES-GCM", iv: bytes.subarray(nonce, nonce + 12), additionalData };
  try {
    return new Uint8Array(await subtle.decrypt(parameters, key, bytes.subarray(nonce + 12, end)));
  } catch {
    return null;
  }
}

function checkIdentity({ header }, identity, start) {
  const names = FIELDS.filter((name) => name !== "recipe" && name !== "tenant");
  const expected = new Map(names.map((name) => [name === "model" ? "name" : name, identity[name] ?? ""]));
  for (const name of [...expected.keys(), ...header.model.keys()])
    need((header.model.get(name) ?? "") === expected.get(name), "store-2", `the entry is of another ${name}`);
  need(header.recipe === (identity.recipe ?? ""), "store-2", "the entry is of another recipe");
  need(header.start === start, "store-2", `the entry starts at ${header.start}, not at ${start}`);
}

function checkPayload(file, bytes, digest) {
  const first = file.header.tensors[0];
  const from = first ? file.dataStart + Number(first.offset) : bytes.length;
  if (!equalBytes(xxh3(bytes.subarray(from)), digest)) digestMismatch("store-3", "the payload is damaged");
  need(!file.header.tensors.some(({ filter }) => filter !== "none"), "store-19", "a tensor has a filter");
}
// Open the entry of a chunk that was found under `key`: { file, parent, inputs, ids }.
// expected: { identity (fields as for rootKey; null for any, with any start), start, parent (null for any),
// limit (bytes) }.
export async function openChunk(bytes, key, { identity, start, parent: before, limit = 2 ** 29 }) {
  if (bytes.length > limit) return null;
  const file = await open(fromBytes(bytes));
  const record = file.header.ignorable.get("prefix-store-2");
  const idBytes = record ? record.length - 81 - record[80] : NaN;
  if (!(idBytes >= 0 && idBytes % 4 === 0)) badHeader("store-2", "the file is not the entry of a chunk");
  const [parent, inputs] = [record.slice(32, 64), record.slice(81, 81 + record[80])];
  const ids = [...view(record.slice(81 + record[80]), Uint32Array)];
  const own = await chunkKey(parent, ids, inputs);
  need(equalBytes(record.subarray(0, 32), key) && equalBytes(own, key), "store-2", "the key is another");
  need(!before || equalBytes(parent, before), "store-2", "the parent is another");
  if (identity) checkIdentity(file, identity, start);
  for (const { batch, tail, packed } of file.layers.flatMap(sidesOf)) {
    const plain = batch === 1 && !tail && packed === ids.length;
    need(plain, "store-19", "a side of the entry is not one sequence of its tokens, all packed");
  }
  const { starts, start: first } = file.header;
  need(!starts.some((value) => value !== first), "store-19", "a layer has another start");
  checkPayload(file, bytes, record.subarray(64, 80));
  return { file, parent, inputs, ids };
}
// Open the entry of the states after a chunk, found under statesKey(chunk).
export async function openStates(bytes, chunk, { identity, start, limit = 2 ** 29 }) {
  if (bytes.length > limit) return null;
  const file = await open(fromBytes(bytes));
  const record = file.header.ignorable.get("prefix-states");
  need(record?.length === 80, "store-21", "the file is not an entry of states");
  const names = concat(await statesKey(chunk), chunk);
  need(equalBytes(record.subarray(0, 64), names), "store-21", "the entry has another key or chunk");
  if (file.layers.some(({ k, v }) => k || v) || file.header.states.some(({ shape }) => shape[0] !== 1))
    badHeader("store-21", "an entry of states has sides, or states of several sequences");
  try {
    if (identity) checkIdentity(file, identity, start);
    checkPayload(file, bytes, record.subarray(64, 80));
  } catch (error) {
    if (error instanceof KvpackError && error.kind === "InvalidHeader") badHeader("store-21", error.message);
    throw error;
  }
  return { file };
}
