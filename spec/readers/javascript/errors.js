// The errors with which a reader refuses a file (README.md, Refusals).

export class KvpackError extends Error {
  // kind: a class in README.md, such as "InvalidHeader". rule: the violated rule, such as "group-2".
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
// Refuses a header, or other contents of a file, that violate a rule.
export const need = (kept, rule, message) => kept || badHeader(rule, message);
export const must = (kept, rule, message) => kept || badPayload(rule, message);
// Refuses a number above a limit of the format or of the caller.
export const limit = (value, most, what) =>
  value <= most || aboveLimit("container-29", `${what}: ${value} is above the limit of ${most}`);
export const quoted = (text) => JSON.stringify(String(text).slice(0, 80));
