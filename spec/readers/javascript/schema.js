// Types of the values of a header, and its maps by tables of their keys.
import { limit, need, quoted } from "./errors.js";
import { MAX_NAMES, compareText } from "./msgpack.js";
import { isInteger } from "./numbers.js";

export const MAX_TOKENS = 2 ** 40 - 1;
// A type is a function of a value and its name: whether it is of the type. It refuses what exceeds a limit.
const integer = (least, most) => (value) => isInteger(value) && value >= least && value <= most;
const limited = (least, most) => (value, what) =>
  isInteger(value) && value >= least && limit(value, most, what);
const oneOf = (values) => (value) => values.includes(value);
export const isBytes = (value) => value instanceof Uint8Array;
export const isMap = (value) => value instanceof Map;
export const isText = (value) => typeof value === "string";
export const list = (type, most) => (value, what) =>
  Array.isArray(value) && limit(value.length, most, what) && value.every((entry) => type(entry, what));

function ascending(names, rule, what) {
  const at = names.findIndex((name, i) => i && compareText(names[i - 1], name) >= 0);
  return need(at < 0, rule, `${what} is not in ascending order at ${quoted(names[at])}`);
}
const mapTo = (type) => (value, what) =>
  isMap(value) && [...value.values()].every(type) && ascending([...value.keys()], "container-10", what);
const names = (value, what) => list(isText, MAX_NAMES)(value, what) && ascending(value, "container-34", what);
const TYPES = {
  any: () => true,
  blobs: mapTo(isBytes),
  bytes: isBytes,
  codecs: list(isMap, 4096),
  digest: (value) => isBytes(value) && value.length === 32,
  dim: integer(1, 1024),
  even: (value) => integer(2, 1024)(value) && value % 2 === 0,
  fields: isMap,
  half: oneOf(["fp16", "fp32"]),
  integer: isInteger,
  levels: (value) => isText(value) && /^[1-8](\.[1-8])*$/.test(value),
  names,
  norms: oneOf(["fp16", "fp32", "log8"]),
  rotation_kind: oneOf(["none", "hadamard", "signed-hadamard"]),
  runs: list(limited(1, MAX_TOKENS), 131072),
  seed: integer(0, 2n ** 64n - 1n),
  tensors: list(Array.isArray, 131072),
  text: isText,
  texts: mapTo(isText),
  tokens: limited(0, MAX_TOKENS),
};
// The type of a word: a name of TYPES, a range of integers such as 1..8, one that ends at a limit of the
// format such as 1..65536!, or the values that are allowed, such as fp16|fp32.
export function typeOf(word) {
  if (Object.hasOwn(TYPES, word)) return TYPES[word];
  const [least, most] = word.replace("!", "").split("..").map(Number);
  if (most !== undefined) return word.endsWith("!") ? limited(least, most) : integer(least, most);
  const texts = word.split("|");
  return oneOf(texts.some((text) => Number.isNaN(Number(text))) ? texts : texts.map(Number));
}
// The types of the keys of a map, from words such as bits:1..8; a type may be named as its key is.
export function schema(words) {
  const pairs = words.split(/\s+/).map((word) => word.split(":"));
  return Object.fromEntries(pairs.map(([name, type = name]) => [name, typeOf(type)]));
}
// A map that has the keys of a table, in its order, as an object; others break the rules.
export function readMap(map, types, what, keyRule = "container-11", valueRule = keyRule) {
  need(isMap(map), keyRule, `${what} is not a map`);
  const names = Object.keys(types);
  const keys = [...map.keys()];
  const isSame = keys.length === names.length && keys.every((key, i) => key === names[i]);
  need(isSame, keyRule, `${what} has the keys ${quoted(keys)}, not ${names}`);
  for (const [name, value] of map)
    need(types[name](value, `${what}: ${name}`), valueRule, `${what}: ${name} is not one of its table`);
  return Object.fromEntries(map);
}
export const mapOf = (words, rule) => (value, what) => readMap(value, schema(words), what, rule);
