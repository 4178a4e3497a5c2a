// What a reader refuses a file by: README.md, Refusals.

export class KvpackError extends Error {
  // kind: a class of README.md, such as "InvalidHeader"; rule: the number of the broken rule, such as
  // "group-2".
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
export const aboveLimit = (message) => refusal("LimitExceeded")("container-29", message);
