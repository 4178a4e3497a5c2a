// What a reader refuses a file by: README.md, Refusals.

export class KvpackError extends Error {
  // kind: a class of README.md, such as "InvalidHeader"; rule: that of the broken rule, such as "group-2".
  constructor(kind, rule, message) {
    super(`${message} [${rule}]`);
    this.name = "KvpackError";
    Object.assign(this, { kind, rule });
  }
}
const refusal = (kind) => (rule, message) => {
  throw new KvpackError(kind, rule, message);
};
export const badHeader = refusal("InvalidHeader");
export const badPayload = refusal("InvalidPayload");
export const digestMismatch = refusal("DigestMismatch");
export const missingBasis = refusal("MissingBasis");
export const notKvpack = refusal("NotKvpack");
export const truncated = refusal("Truncated");
export const unknownCodec = refusal("UnknownCodec");
export const unsupported = refusal("UnsupportedVersion");
const aboveLimit = refusal("LimitExceeded");
// Refuse a header, or what a file holds otherwise, that does not keep a rule.
export const need = (kept, rule, message) => kept || badHeader(rule, message);
export const must = (kept, rule, message) => kept || badPayload(rule, message);
// Refuse a number above a limit of the format or of the caller.
export const limit = (value, most, what) =>
  value <= most || aboveLimit("container-29", `${what}: ${value} is above the limit of ${most}`);
export const quoted = (text) => JSON.stringify(String(text).slice(0, 80));
