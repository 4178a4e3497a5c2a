// The generator and rotations (README.md).
import { range } from "./numbers.js";

const wrap = (x) => BigInt.asUintN(64, x);

export class Generator {
  constructor(seed) {
    this.state = BigInt(seed);
  }
  word() {
    let z = (this.state = wrap(this.state + 0x9e3779b97f4a7c15n));
    z = wrap((z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
    z = wrap((z ^ (z >> 27n)) * 0x94d049bb133111ebn);
    return z ^ (z >> 31n);
  }
  symmetric() {
    return (Number(this.word() >> 11n) - 2 ** 52) / 2 ** 52;
  }
  // A point of the disc, and the square of its distance from the middle.
  point() {
    const [x, y] = [this.symmetric(), this.symmetric()];
    const q = x * x + y * y;
    return q > 0 && q < 1 ? [x, y, q] : this.point();
  }
  quaternion() {
    const [a, b, q1] = this.point();
    const [c, d, q2] = this.point();
    const t = Math.sqrt((1 - q1) / q2);
    return [a, b, c * t, d * t];
  }
}

function signs(count, seed) {
  const generator = new Generator(seed);
  const words = range(Math.ceil(count / 64), () => generator.word());
  return range(count, (i) => ((words[i >> 6] >> BigInt(i & 63)) & 1n ? -1 : 1));
}
// Whether a is the square of a non-zero number modulo r, as +1 or -1; 0 for multiples of r.
function residue(a, r) {
  const rest = ((a % r) + r) % r;
  return rest && (range(r, (i) => (i * i) % r).includes(rest) ? 1 : -1);
}
const square = (order, entry) => range(order, (i) => range(order, (j) => entry(i, j)));
// A Hadamard matrix of order 1, 12, 20 or 28, by squares modulo a prime.
function paley(order) {
  if (order === 1) return [[1]];
  if (order < 28)
    return square(order, (i, j) => (i === 0 ? 1 : j === 0 ? -1 : i === j ? 1 : residue(i - j, order - 1)));
  const c = (i, j) => (i === j ? 0 : i === 0 || j === 0 ? 1 : residue(i - j, 13));
  const block = (i, j) => (i === j ? [1, -1, -1, -1] : [1, 1, 1, -1].map((entry) => entry * c(i, j)));
  return square(28, (i, j) => block(i >> 1, j >> 1)[2 * (i & 1) + (j & 1)]);
}
// m of the Hadamard matrix of order 2^k · m, or 0 where there is none.
const factor = (order) => [1, 12, 20, 28].find((m) => /^10*$/.test((order / m).toString(2))) ?? 0;
export const hasHadamard = (order) => factor(order) > 0;
// The inverse rotation of `order` values, in binary64: x_j = (s_j / √order) Σ_i H_ij u_i.
export class Rotation {
  constructor(order, kind, seed) {
    const m = factor(order);
    const all = kind === "signed-hadamard" ? signs(order, seed) : range(order, () => 1);
    const factors = Float64Array.from(all, (sign) => sign / Math.sqrt(order));
    Object.assign(this, { order, m, paley: paley(m).flat(), factors, part: new Float64Array(m) });
  }
  // Applies the inverse rotation to `order` values of a Float64Array, from `at` on.
  invert(values, at = 0) {
    const { order, m, factors } = this;
    if (m > 1) for (let block = at; block < at + order; block += m) this.#invertBlock(values, block);
    for (let step = m; step < order; step *= 2)
      for (let block = at; block < at + order; block += 2 * step)
        for (let i = block; i < block + step; i++) {
          const [a, b] = [values[i], values[i + step]];
          values[i] = a + b;
          values[i + step] = a - b;
        }
    for (let i = 0; i < order; i++) values[at + i] *= factors[i];
  }
  #invertBlock(values, at) {
    const { m, paley: matrix, part } = this;
    part.fill(0);
    for (let p = 0; p < m; p++) for (let q = 0; q < m; q++) part[q] += matrix[p * m + q] * values[at + p];
    values.set(part, at);
  }
}
