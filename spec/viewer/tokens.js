// Token ids as text, by the tokenizer.json of Hugging Face tokenizers.

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

// A function from ids to the text of each. Throws where the file is not a tokenizer.
export function readTokenizer(text) {
  const tokenizer = JSON.parse(text);
  const vocabulary = tokenizer?.model?.vocab;
  if (!vocabulary || typeof vocabulary !== "object")
    throw new Error("the file has no model with a vocabulary");
  const names = new Map();
  if (Array.isArray(vocabulary)) vocabulary.forEach(([name], id) => names.set(id, name));
  else for (const [name, id] of Object.entries(vocabulary)) names.set(id, name);
  const added = new Map();
  for (const { id, content } of tokenizer.added_tokens ?? []) added.set(id, content);
  const used = JSON.stringify([tokenizer.decoder ?? null, tokenizer.pre_tokenizer ?? null]);
  const byteLevel = used.includes('"ByteLevel"');
  const characters = byteLevel ? byteCharacters() : null;
  return (ids) => decodeAll(ids, names, added, characters);
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
      return String(added.get(id));
    }
    if (!names.has(id)) return `[${id}]`;
    return decoder.decode(Uint8Array.from(tokenBytes(String(names.get(id)), characters)), { stream: true });
  });
}
