// Bit packing (README.md): columns(n, bases, F).
import { badPayload, need } from "./errors.js";
import { range } from "./numbers.js";

const isPower = (x) => (x & (x - 1)) === 0;
const bitsOf = (x) => 31 - Math.clz32(x);
// The bytes of a column, or 0 where a limit of packing is exceeded.
function columnBytes(bases, fields) {
  if (!(fields >= 1 && fields <= 128)) return 0;
  const bits = fields * bases.reduce((sum, base) => sum + bitsOf(base), 0);
  if (bases.every(isPower)) return bits <= 128 ? Math.max(Math.ceil(bits / 8), 1) : 0;
  const values = bases.reduce((product, base) => product * BigInt(base) ** BigInt(fields), 1n);
  return values > 2n ** 53n ? 0 : range(7, (i) => i + 1).find((bytes) => 256n ** BigInt(bytes) >= values);
}

export function defaultRowBytes(n, base) {
  const rowBytes = range(Math.min(n, 128), (i) => {
    const [bytes, columns] = [columnBytes([base], i + 1), Math.ceil(n / (i + 1))];
    return bytes ? 2 * (columns * (bytes >> 1) + Math.ceil(columns / 2) * (bytes & 1)) : Infinity;
  });
  return Math.min(...rowBytes);
}
// A packing of rows of n symbols, whose digits have these bases and alphabets.
export class Columns {
  constructor(name, n, bases, alphabets, fields) {
    const bytes = columnBytes(bases, fields);
    const fits = bytes && bases.every((base) => base >= 2 && base <= 65536);
    need(fits, "front-5", `fields of the stream ${name} is ${fields}, beyond the limits of packing`);
    const columns = Math.ceil(n / fields);
    Object.assign(this, { name, n, bases, fields, alphabets, columns, odd: bytes & 1, words: bytes >> 1 });
    // The words of a row in each plane; the last plane may hold the last bytes of two columns.
    this.half = Math.ceil(columns / 2);
    this.planes = [...range(this.words, () => columns), ...range(this.odd, () => this.half)];
    this.powers = bases.every(isPower);
    this.digits = bases.map(() => new Int32Array(columns * fields));
    this.row = new Uint16Array((this.words + 2) * columns);
  }
  // Unpacks one row to this.digits and makes all checks. `planes` are Uint16Arrays of all rows.
  unpack(planes, row) {
    const { name, n, columns, half, words, bases, alphabets } = this;
    for (let p = 0; p < words; p++)
      for (let c = 0, at = row * columns; c < columns; c++) this.row[p * columns + c] = planes[p][at + c];
    for (let c = 0; this.odd && c < 2 * half; c++) {
      const word = planes[words][row * half + (c < half ? c : c - half)];
      const byte = c < half ? word & 255 : word >> 8;
      if (c < columns) this.row[words * columns + c] = byte;
      else if (byte) badPayload("front-4", `${name}: a high byte that no column has is not 0`);
    }
    if (this.powers) this.#bitFields();
    else this.#numbers();
    for (let d = 0; d < bases.length; d++) {
      const digits = this.digits[d];
      for (let i = 0; alphabets[d] !== bases[d] && i < n; i++)
        if (digits[i] >= alphabets[d]) badPayload("front-2", `${name}: a digit of ${digits[i]} is too large`);
      for (let i = n; i < digits.length; i++)
        if (digits[i]) badPayload("front-3", `${name}: a field without a symbol is ${digits[i]}, not 0`);
    }
  }
  #bitFields() {
    const { name, columns, fields, row: words } = this;
    let bit = 0;
    for (let d = 0; d < this.bases.length; d++) {
      const width = bitsOf(this.bases[d]);
      const mask = this.bases[d] - 1;
      const digits = this.digits[d];
      for (let k = 0; k < fields; k++, bit += width) {
        const [at, out, shift] = [(bit >> 4) * columns, k * columns, bit & 15];
        for (let c = 0; c < columns; c++)
          digits[out + c] = ((words[at + c] | (words[at + columns + c] << 16)) >>> shift) & mask;
      }
    }
    const at = (bit >> 4) * columns;
    for (let c = 0; bit & 15 && c < columns; c++)
      if (words[at + c] >> (bit & 15)) badPayload("front-4", `${name}: a column is above its largest value`);
  }
  #numbers() {
    const { name, columns, fields, bases, row: words } = this;
    const most = bases.reduce((product, base) => product * base ** fields, 1);
    for (let c = 0; c < columns; c++) {
      let value = 0;
      for (let p = this.words - 1 + this.odd; p >= 0; p--) value = value * 65536 + words[p * columns + c];
      if (value >= most) badPayload("front-4", `${name}: the column ${value} is above ${most - 1}`);
      for (let d = 0; d < bases.length; d++)
        for (let k = 0; k < fields; k++) {
          const rest = value < 4294967296 ? ((value >>> 0) / bases[d]) >>> 0 : Math.floor(value / bases[d]);
          this.digits[d][k * columns + c] = value - rest * bases[d];
          value = rest;
        }
    }
  }
}
