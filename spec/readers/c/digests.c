/* XXH3-128, XXH64 and SHA-256. */
#define P32 0x9e3779b1u
#define P1 0x9e3779b185ebca87u
#define P2 0xc2b2ae3d27d4eb4fu
#define P3 0x165667b19e3779f9u
#define P4 0x85ebca77c2b2ae63u
#define P5 0x27d4eb2f165667c5u

static const u8 secret[192] = {0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7,
    0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3,
    0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72,
    0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71,
    0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa,
    0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0,
    0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83,
    0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb, 0x17, 0x0d, 0xdd, 0x51, 0xb7,
    0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47,
    0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04,
    0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

static u64 r64(const u8 *p) { return little(p, 8); }
static u64 r32(const u8 *p) { return little(p, 4); }
static u64 rotl(u64 x, int r) { return x << r | x >> (64 - r); }
static u32 rotr(u32 x, int r) { return x >> r | x << (32 - r); }
/* Returns the number at an offset of the secret, for an input of at most 16 bytes. */
static u64 key_at(int at) { return r64(secret + at) ^ r64(secret + at + 8); }

typedef struct {
  u64 low, high;
} wide;

static wide multiply(u64 a, u64 b) {
  u64 al = a & 0xffffffff, ah = a >> 32, bl = b & 0xffffffff, bh = b >> 32;
  u64 ll = al * bl, hl = ah * bl, lh = al * bh, hh = ah * bh;
  u64 cross = (ll >> 32) + (hl & 0xffffffff) + lh;
  return (wide){cross << 32 | (ll & 0xffffffff), (hl >> 32) + (cross >> 32) + hh};
}

static u64 fold(u64 a, u64 b) {
  wide product = multiply(a, b);
  return product.low ^ product.high;
}

static u64 mix(u64 h, int shift, u64 factor) { return (h ^ h >> shift) * factor; }
static u64 avalanche(u64 h) { return mix(mix(h, 37, 0x165667919e3779f9u), 32, 1); }
static u64 avalanche64(u64 h) { return mix(mix(mix(h, 33, P2), 29, P3), 32, 1); }

static u64 mix16(const u8 *in, const u8 *key) { return fold(r64(in) ^ r64(key), r64(in + 8) ^ r64(key + 8)); }

static void mix32(wide *acc, const u8 *a, const u8 *b, const u8 *key) {
  acc->low = (acc->low + mix16(a, key)) ^ (r64(b) + r64(b + 8));
  acc->high = (acc->high + mix16(b, key + 16)) ^ (r64(a) + r64(a + 8));
}

static wide xxh3_short(const u8 *in, u64 n) {
  if (!n) return (wide){avalanche64(key_at(64)), avalanche64(key_at(80))};
  if (n <= 3) {
    u8 bytes[] = {in[n - 1], (u8)n, in[0], in[n / 2]};
    u64 low = r32(bytes) ^ r32(secret) ^ r32(secret + 4);
    u64 high = rotr((u32)big(bytes, 4), 19) ^ r32(secret + 8) ^ r32(secret + 12);
    return (wide){avalanche64(low), avalanche64(high)};
  }
  if (n <= 8) {
    wide m = multiply((r32(in) + (r32(in + n - 4) << 32)) ^ key_at(16), P1 + (n << 2));
    m.high += m.low << 1;
    m.low ^= m.high >> 3;
    return (wide){mix(mix(m.low, 35, 0x9fb21c651e98df25u), 28, 1), avalanche(m.high)};
  }
  u8 swapped[8];
  u64 high = r64(in + n - 8) ^ key_at(48);
  wide m = multiply(r64(in) ^ r64(in + n - 8) ^ key_at(32), P1);
  m.high += high + (high & 0xffffffff) * 0x85ebca76;
  put_big(swapped, m.high, 8);
  wide h = multiply((m.low + ((n - 1) << 54)) ^ r64(swapped), P2);
  return (wide){avalanche(h.low), avalanche(h.high + m.high * P2)};
}

static wide xxh3_middle(const u8 *in, u64 n) {
  wide acc = {n * P1, 0};
  if (n <= 128) {
    for (u64 i = (n - 1) / 32 + 1; i--;) mix32(&acc, in + 16 * i, in + n - 16 * (i + 1), secret + 32 * i);
  } else {
    for (u64 i = 32; i < 160; i += 32) mix32(&acc, in + i - 32, in + i - 16, secret + i - 32);
    acc = (wide){avalanche(acc.low), avalanche(acc.high)};
    for (u64 i = 160; i <= n; i += 32) mix32(&acc, in + i - 32, in + i - 16, secret + 3 + i - 160);
    mix32(&acc, in + n - 16, in + n - 32, secret + 103);
  }
  u64 high = acc.low * P1 + acc.high * P4 + n * P2;
  return (wide){avalanche(acc.low + acc.high), 0 - avalanche(high)};
}

static void accumulate(u64 acc[8], const u8 *in, const u8 *key) {
  for (int i = 0; i < 8; i++) {
    u64 data = r64(in + 8 * i), keyed = data ^ r64(key + 8 * i);
    acc[i ^ 1] += data;
    acc[i] += (keyed & 0xffffffff) * (keyed >> 32);
  }
}

static u64 merge(const u64 acc[8], const u8 *key, u64 sum) {
  for (int i = 0; i < 4; i++)
    sum += fold(acc[2 * i] ^ r64(key + 16 * i), acc[2 * i + 1] ^ r64(key + 16 * i + 8));
  return avalanche(sum);
}

static wide xxh3_long(const u8 *in, u64 n) {
  u64 acc[8] = {0xc2b2ae3d, P1, P2, P3, P4, 0x85ebca77, P5, P32};
  u64 stripes = (n - 1) / 64;
  for (u64 i = 0; i < stripes; i++) {
    accumulate(acc, in + 64 * i, secret + 8 * (i % 16));
    for (int k = 0; i % 16 == 15 && k < 8; k++)
      acc[k] = (acc[k] ^ acc[k] >> 47 ^ r64(secret + 128 + 8 * k)) * P32;
  }
  accumulate(acc, in + n - 64, secret + 121);
  return (wide){merge(acc, secret + 11, n * P1), merge(acc, secret + 117, ~(n * P2))};
}

static bool has_xxh3(kv_bytes bytes, const u8 *digest) {
  const u8 *in = bytes.data;
  u64 n = bytes.size;
  wide h = n <= 16 ? xxh3_short(in, n) : n <= 240 ? xxh3_middle(in, n) : xxh3_long(in, n);
  return big(digest, 8) == h.high && big(digest + 8, 8) == h.low;
}

static u64 round64(u64 acc, u64 input) { return rotl(acc + input * P2, 31) * P1; }

static u64 xxh64(const u8 *in, u64 n) {
  const u8 *end = in + n;
  u64 h = P5, v[4] = {P1 + P2, P2, 0, 0 - P1};
  if (n >= 32) {
    for (; end - in >= 32; in += 32)
      for (int i = 0; i < 4; i++) v[i] = round64(v[i], r64(in + 8 * i));
    h = rotl(v[0], 1) + rotl(v[1], 7) + rotl(v[2], 12) + rotl(v[3], 18);
    for (int i = 0; i < 4; i++) h = (h ^ round64(0, v[i])) * P1 + P4;
  }
  h += n;
  for (; end - in >= 8; in += 8) h = rotl(h ^ round64(0, r64(in)), 27) * P1 + P4;
  for (; end - in >= 4; in += 4) h = rotl(h ^ r32(in) * P1, 23) * P2 + P3;
  for (; in < end; in++) h = rotl(h ^ *in * P5, 11) * P1;
  return avalanche64(h);
}
/* The first 32 bits of the fractions of the square roots of 8 prime numbers, and of the cube roots of 64. */
static void fill_constants(u32 state[8], u32 constants[64]) {
  for (int n = 2, count = 0; count < 64; n++) {
    int divisor = 2;
    while (n % divisor) divisor++;
    if (divisor < n) continue;
    if (count < 8) state[count] = (u32)(fmod(sqrt(n), 1) * 0x1p32);
    constants[count++] = (u32)(fmod(cbrt(n), 1) * 0x1p32);
  }
}

static void sha_block(u32 state[8], const u32 constants[64], const u8 *in) {
  u32 w[64], s[8];
  for (int i = 0; i < 16; i++) w[i] = (u32)big(in + 4 * i, 4);
  for (int i = 16; i < 64; i++) {
    u32 a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (rotr(a, 7) ^ rotr(a, 18) ^ a >> 3) + w[i - 7] + (rotr(b, 17) ^ rotr(b, 19) ^ b >> 10);
  }
  memcpy(s, state, sizeof s);
  for (int i = 0; i < 64; i++) {
    u32 e = s[4], a = s[0];
    u32 t1 = w[i] + constants[i] + s[7];
    t1 += (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + ((e & s[5]) ^ (~e & s[6]));
    u32 t2 = (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
    memmove(s + 1, s, 7 * sizeof *s);
    s[4] += t1;
    s[0] = t1 + t2;
  }
  for (int i = 0; i < 8; i++) state[i] += s[i];
}

static void sha256(kv_bytes bytes, u8 digest[32]) {
  u32 state[8], constants[64];
  u64 size = bytes.size, whole = size / 64 * 64, rest = size - whole, padded = rest < 56 ? 64 : 128;
  u8 last[128] = {0};
  fill_constants(state, constants);
  for (u64 i = 0; i < whole; i += 64) sha_block(state, constants, bytes.data + i);
  if (rest) memcpy(last, bytes.data + whole, rest);
  last[rest] = 0x80;
  put_big(last + padded - 8, size * 8, 8);
  for (u64 i = 0; i < padded; i += 64) sha_block(state, constants, last + i);
  for (int i = 0; i < 8; i++) put_big(digest + 4 * i, state[i], 4);
}
