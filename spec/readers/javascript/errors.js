// What a reader refuses a file by: README.md, Refusals.

export class KvpackError extends Error {
  // kind: a class of README.md, such as "InvalidHeader"; rule: the number of the broken rule, such as
  // "group-2".
  constructor(kind, rule, message) {
    super(`${message} [${rule}]`);
    this.name = "KvpackError";
    this.kind = kind;
    this.rule = rule;
  }
}

export function refuse(kind, rule, message) {
  throw new KvpackError(kind, rule, message);
}

export function badHeader(rule, message) {
  refuse("InvalidHeader", rule, message);
}

export function badPayload(rule, message) {
  refuse("InvalidPayload", rule, message);
}

export function aboveLimit(message) {
  refuse("LimitExceeded", "container-29", message);
}
