// Token ids as text, by the tokenizer.json of Hugging Face tokenizers.

const MAX_BYTES = 2 ** 27;
const MAX_TEXT = 200;

// The bytes that byte-level vocabularies write as visible characters.
function byteCharacters() {
  const result = new Map();
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const visible = (byte > 32 && byte < 127) || (byte > 160 && byte < 256 && byte !== 173);
    result.set(String.fromCodePoint(visible ? byte : next++), byte);
  }
  return result;
}

// A function from ids to the text of each. Throws where a file is not a tokenizer, or too large.
export async function readTokenizer(blob) {
  if (blob.size > MAX_BYTES)
    throw new Error(`the file has ${blob.size} bytes; a tokenizer.json has at most ${MAX_BYTES}`);
  const tokenizer = parseJson(await blob.text());
  const vocabulary = tokenizer?.model?.vocab;
  if (!vocabulary || typeof vocabulary !== "object")
    throw new Error("the file has no model.vocab with an id for each token: choose a tokenizer.json");
  const pairs = Array.isArray(vocabulary)
    ? vocabulary.map((entry, id) => [entry?.[0], id])
    : Object.entries(vocabulary);
  const added = tokenizer.added_tokens ?? [];
  if (!Array.isArray(added)) throw new Error("added_tokens of the tokenizer is not an array");
  const names = namesById(pairs, "model.vocab");
  const whole = namesById(
    added.map((token) => [token?.content, token?.id]),
    "added_tokens",
  );
  const isByteLevel = [tokenizer.decoder, tokenizer.pre_tokenizer].some((part) => uses(part, "ByteLevel"));
  const characters = isByteLevel ? byteCharacters() : null;
  return (ids) => decodeAll(ids, names, whole, characters);
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`the file is not valid JSON: ${error.message}`);
  }
}

function namesById(pairs, what) {
  const result = new Map();
  for (const [name, id] of pairs) {
    if (typeof name !== "string" || !Number.isInteger(id) || id < 0)
      throw new Error(`${what} of the tokenizer has an entry that is not a text with an id`);
    result.set(id, name.slice(0, MAX_TEXT));
  }
  return result;
}

// Whether a part of a tokenizer, or one of a sequence of parts, has a type.
function uses(part, type) {
  const parts = [part, ...[part?.decoders, part?.pretokenizers].filter(Array.isArray).flat()];
  return parts.some((one) => one?.type === type);
}

function tokenBytes(name, characters) {
  const encoder = new TextEncoder();
  if (characters)
    return [...name].flatMap((one) =>
      characters.has(one) ? [characters.get(one)] : [...encoder.encode(one)],
    );
  const byte = /^<0x([0-9A-Fa-f]{2})>$/.exec(name);
  return byte ? [parseInt(byte[1], 16)] : [...encoder.encode(name.replaceAll("\u2581", " "))];
}

// A character whose bytes are spread over several tokens is shown at the last of them.
function decodeAll(ids, names, added, characters) {
  let decoder = new TextDecoder();
  return ids.map((id) => {
    if (added.has(id)) {
      decoder = new TextDecoder();
      return added.get(id);
    }
    if (!names.has(id)) return `[${id}]`;
    return decoder.decode(Uint8Array.from(tokenBytes(names.get(id), characters)), { stream: true });
  });
}
