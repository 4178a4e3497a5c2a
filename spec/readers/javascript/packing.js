// Bit packing (README.md): columns(n, bases, F).

import { badHeader, badPayload } from "./errors.js";

const isPower = (x) => (x & (x - 1)) === 0;
const bitsOf = (x) => 31 - Math.clz32(x);

// The bytes of a column, or 0 where a limit of packing is exceeded.
function columnBytes(bases, fields) {
  if (!(fields >= 1 && fields <= 128)) return 0;
  if (bases.every(isPower)) {
    const bits = fields * bases.reduce((sum, base) => sum + bitsOf(base), 0);
    return bits <= 128 ? Math.max(Math.ceil(bits / 8), 1) : 0;
  }
  let values = 1n;
  for (const base of bases) values *= BigInt(base) ** BigInt(fields);
  if (values > 2n ** 53n) return 0;
  let bytes = 1;
  while (256n ** BigInt(bytes) < values) bytes++;
  return bytes;
}

function rowBytes(n, bytes, fields) {
  const columns = Math.ceil(n / fields);
  return 2 * (columns * (bytes >> 1) + Math.ceil(columns / 2) * (bytes & 1));
}

// The bytes of a row at the default F.
export function defaultRowBytes(n, base) {
  let best = null;
  for (let fields = 1; fields <= n; fields++) {
    const bytes = columnBytes([base], fields);
    if (bytes && (best === null || rowBytes(n, bytes, fields) < best)) best = rowBytes(n, bytes, fields);
  }
  return best;
}

// A packing of rows of n symbols. `alphabets` are those of the digits, where they are not the bases.
export class Columns {
  constructor(name, n, bases, fields, alphabets = bases) {
    Object.assign(this, { name, n, bases, fields, alphabets });
    this.bytes = columnBytes(bases, fields);
    if (!this.bytes || bases.some((base) => base < 2 || base > 65536))
      badHeader("front-5", `fields of the stream ${name} is ${fields}, beyond the limits of packing`);
    this.columns = Math.ceil(n / fields);
    this.half = Math.ceil(this.columns / 2);
    // The words of a row in each plane; the last plane holds the last bytes of columns of an odd number of
    // them.
    this.planes = new Array(this.bytes >> 1).fill(this.columns);
    if (this.bytes & 1) this.planes.push(this.half);
    this.powers = bases.every(isPower);
    this.digits = bases.map(() => new Int32Array(this.columns * fields));
  }

  // Unpack one row into this.digits, and make all checks. `planes` are Uint16Arrays of all rows.
  unpack(planes, row) {
    if (this.bytes & 1 && this.columns & 1) {
      const last = planes[planes.length - 1];
      if (last[(row + 1) * this.half - 1] > 255)
        badPayload("front-4", `${this.name}: a high byte that no column has is not 0`);
    }
    if (this.powers) this.#bitFields(planes, row);
    else this.#numbers(planes, row);
    this.digits.forEach((digits, d) => {
      if (this.alphabets[d] !== this.bases[d])
        for (let i = 0; i < this.n; i++)
          if (digits[i] >= this.alphabets[d])
            badPayload("front-2", `${this.name}: the digit ${digits[i]} is not below ${this.alphabets[d]}`);
      for (let i = this.n; i < digits.length; i++)
        if (digits[i]) badPayload("front-3", `${this.name}: a field without a symbol is ${digits[i]}, not 0`);
    });
    return this.digits;
  }

  #bitFields(planes, row) {
    const { columns, half, fields } = this;
    const whole = this.bytes >> 1;
    // The 16-bit words of the columns, word after word.
    const words = (this.words ??= new Uint16Array((whole + 2) * columns));
    for (let p = 0; p < whole; p++)
      words.set(planes[p].subarray(row * columns, (row + 1) * columns), p * columns);
    if (this.bytes & 1) {
      const plane = planes[whole];
      for (let c = 0; c < columns; c++) {
        const word = plane[row * half + (c < half ? c : c - half)];
        words[whole * columns + c] = c < half ? word & 255 : word >> 8;
      }
    }
    let bit = 0;
    for (let d = 0; d < this.bases.length; d++) {
      const width = bitsOf(this.bases[d]);
      const mask = this.bases[d] - 1;
      const digits = this.digits[d];
      for (let k = 0; k < fields; k++, bit += width) {
        const at = (bit >> 4) * columns;
        const shift = bit & 15;
        const out = k * columns;
        if (shift + width <= 16)
          for (let c = 0; c < columns; c++) digits[out + c] = (words[at + c] >> shift) & mask;
        else
          for (let c = 0; c < columns; c++)
            digits[out + c] = ((words[at + c] | (words[at + columns + c] << 16)) >>> shift) & mask;
      }
    }
    if (bit & 15)
      for (let c = 0, at = (bit >> 4) * columns; c < columns; c++)
        if (words[at + c] >> (bit & 15))
          badPayload("front-4", `${this.name}: a column is above its largest value`);
  }

  #numbers(planes, row) {
    const { columns, half, fields, bases } = this;
    const whole = this.bytes >> 1;
    const most = bases.reduce((product, base) => product * base ** fields, 1);
    for (let c = 0; c < columns; c++) {
      let value = 0;
      if (this.bytes & 1) {
        const word = planes[whole][row * half + (c < half ? c : c - half)];
        value = c < half ? word & 255 : word >> 8;
      }
      for (let p = whole - 1; p >= 0; p--) value = value * 65536 + planes[p][row * columns + c];
      if (value >= most) badPayload("front-4", `${this.name}: the column ${value} is above ${most - 1}`);
      for (let d = 0; d < bases.length; d++) {
        const base = bases[d];
        for (let k = 0; k < fields; k++) {
          const rest = value < 4294967296 ? ((value >>> 0) / base) >>> 0 : Math.floor(value / base);
          this.digits[d][k * columns + c] = value - rest * base;
          value = rest;
        }
      }
    }
  }
}
