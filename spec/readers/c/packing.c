/* Bit packing, the generator, rotations and norms of 8 bits (packing.md). */
static bool is_power(u64 number) { return !(number & (number - 1)); }
/* Returns whether fields are bit fields, and not digits of a number. A base of 0 counts as a power. */
static bool has_bits(const kv_packing *p) { return is_power(p->base[0]) && is_power(p->base[1]); }
/* Computes the columns, bytes and planes of a packing. Returns false above a limit (rule front-5). */
static bool pack_sizes(kv_packing *p) {
  u64 values = 1, bits = 0;
  if (p->fields < 1 || p->fields > 128) return false;
  for (u32 d = 0; d < p->digits; d++) {
    if (p->base[d] < 2 || p->base[d] > 65536) return false;
    bits += p->fields * highest(p->base[d]);
    for (u32 k = 0; k < p->fields; k++) values = times(values, p->base[d]);
  }
  p->bytes = (u32)(bits + 7) / 8;
  if (!has_bits(p)) {
    if (values > (u64)1 << 53) return false;
    p->bytes = highest(values - 1) / 8 + 1;
  }
  p->columns = (p->symbols + p->fields - 1) / p->fields;
  p->planes = (p->bytes + 1) / 2;
  return p->bytes <= 16;
}
/* Returns the bytes of a row of one digit with the default F, which takes the fewest bytes. */
static u64 default_bytes(u32 symbols, u32 base) {
  u64 least = UINT64_MAX;
  for (u32 fields = 1; fields <= symbols && fields <= 128; fields++) {
    kv_packing p = {.symbols = symbols, .digits = 1, .fields = fields, .base = {base}};
    if (!pack_sizes(&p)) break;
    u64 bytes = 2 * ((u64)p.columns * (p.bytes / 2) + (p.columns + 1) / 2 * (p.bytes % 2));
    least = bytes < least ? bytes : least;
  }
  return least;
}
/* Unpacks the digits of a row: digit 0 of all symbols, followed by digit 1 of all symbols. */
static void unpack(kv_reader *r, const kv_packing *p, const u8 *const planes[], u64 row, u32 *digits) {
  u32 half = (p->columns + 1) / 2, last = p->planes - 1;
  int widths[] = {highest(p->base[0]), highest(p->base[1])};
  bool odd = p->bytes % 2, bits = has_bits(p), padded = odd && p->columns % 2;
  need(r, !padded || !planes[last][2 * (row + 1) * half - 1], "front-4", "a row of %s has no zero", p->name);
  for (u32 c = 0; c < p->columns; c++) {
    u8 bytes[16] = {0};
    for (u32 plane = 0; plane < p->bytes / 2; plane++)
      memcpy(bytes + 2 * plane, planes[plane] + 2 * (row * p->columns + c), 2);
    if (odd) bytes[p->bytes - 1] = planes[last][2 * (row * half + c % half) + c / half];
    u64 left = little(bytes, 8), at = 0;
    for (u32 i = 0; i < p->digits * p->fields; i++) {
      u32 d = i / p->fields, symbol = i % p->fields * p->columns + c;
      u64 digit = bits ? get_bits(bytes, at, widths[d]) : left % p->base[d];
      bool used = symbol < p->symbols;
      need(r, used || !digit, "front-3", "a field of %s without a symbol is not zero", p->name);
      need(r, !used || digit < p->alphabet[d], "front-2", "a digit of %s is %llu", p->name, digit);
      if (used) digits[d * p->symbols + symbol] = (u32)digit;
      at += widths[d];
      left /= p->base[d];
    }
    if (bits) left = get_bits(bytes, at, (int)(8 * p->bytes - at));
    need(r, !left, "front-4", "a column of %s is above its largest value", p->name);
  }
}

static u64 generate(u64 *state) {
  *state += 0x9e3779b97f4a7c15u;
  return mix(mix(mix(*state, 30, 0xbf58476d1ce4e5b9u), 27, 0x94d049bb133111ebu), 31, 1);
}

static double disc(u64 *state, double point[2]) {
  for (;;) {
    for (int i = 0; i < 2; i++) point[i] = ((double)(generate(state) >> 11) - 0x1p52) / 0x1p52;
    /* Each operation is rounded, so the compiler must not fuse them. */
    volatile double a = point[0] * point[0], b = point[1] * point[1], q = a + b;
    if (q > 0 && q < 1) return q;
  }
}

static signed char *make_signs(kv_reader *r, u64 seed, u32 count) {
  signed char *signs = take(r, count, 1);
  u64 word = 0;
  for (u32 i = 0; i < count; i++, word >>= 1) {
    if (i % 64 == 0) word = generate(&seed);
    signs[i] = word & 1 ? -1 : 1;
  }
  return signs;
}

static u32 paley_order(u32 order) {
  static const u32 orders[] = {1, 12, 20, 28};
  for (int i = 0; order && i < 4; i++)
    if (order % orders[i] == 0 && is_power(order / orders[i])) return orders[i];
  return 0;
}

static int chi(int a, int r) {
  a = (a % r + r) % r;
  for (int k = 1; k < r; k++)
    if (a && k * k % r == a) return 1;
  return a ? -1 : 0;
}
/* Returns element (i, j) of the matrix. The order is 1, or a prime plus 1, or twice a prime plus 2. */
static int paley(int order, int i, int j) {
  if (order == 1) return 1;
  int halves = order == 28 ? 2 : 1, r = order / halves - 1, a = i / halves, b = j / halves;
  if (halves == 1) return i && i == j ? 1 : i && j ? chi(i - j, r) : i ? -1 : 1;
  int c = a && b ? chi(a - b, r) : a != b;
  if (!c) return i % 2 || j % 2 ? -1 : 1;
  return i % 2 && j % 2 ? -c : c;
}
/* x_j = s_j / sqrt(order) times the sum of H_ij u_i; `signs` may be NULL. */
static void rotate_back(const double *u, double *x, u32 order, const signed char *signs) {
  u32 m = paley_order(order);
  signed char matrix[28][28];
  for (u32 i = 0; i < m * m; i++) matrix[i / m][i % m] = (signed char)paley(m, i / m, i % m);
  for (u32 j = 0; j < order; j++) {
    x[j] = 0;
    for (u32 p = 0; p < m; p++) x[j] += matrix[p][j % m] * u[j - j % m + p];
  }
  for (u32 step = m; step < order; step *= 2)
    for (u32 i = 0; i < order; i++)
      if (!(i / step & 1)) {
        double a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
  for (u32 j = 0; j < order; j++) x[j] *= (signs ? signs[j] : 1) / sqrt(order);
}

static float norm_of_code(u8 code) { return code ? (float)exp2((code - 1) / 16.0 - 7) : 0; }
