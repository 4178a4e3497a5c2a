/* AES-GCM, for encrypted entries of stores. */
typedef struct {
  u8 box[256], keys[240];
  u32 rounds;
} cipher;

static u8 twice(u8 x) { return (u8)(x << 1 ^ (x >> 7) * 0x1b); }

static void expand_key(cipher *c, kv_bytes key) {
  u32 words = (u32)key.size / 4;
  u8 constant = 1, p = 1, q = 1; /* p runs through all powers of 3, and q through their inverses */
  do {
    p ^= twice(p);
    q ^= (u8)(q << 1);
    q ^= (u8)(q << 2);
    q ^= (u8)(q << 4);
    q ^= (q >> 7) * 0x09;
    u32 turned = q * 0x0101u;
    c->box[p] = (u8)(q ^ turned >> 7 ^ turned >> 6 ^ turned >> 5 ^ turned >> 4 ^ 0x63);
  } while (p != 1);
  c->box[0] = 0x63;
  c->rounds = words + 6;
  memcpy(c->keys, key.data, key.size);
  for (u32 i = words; i < 4 * (c->rounds + 1); i++) {
    u8 *to = c->keys + 4 * i, last[4];
    bool turns = i % words == 0, boxed = turns || (words > 6 && i % words == 4);
    for (int k = 0; k < 4; k++) last[k] = to[(turns ? (k + 1) % 4 : k) - 4];
    for (int k = 0; k < 4; k++) to[k] = to[k - 4 * (int)words] ^ (boxed ? c->box[last[k]] : last[k]);
    if (turns) to[0] ^= constant;
    if (turns) constant = twice(constant);
  }
}

static void encrypt_block(const cipher *c, const u8 from[16], u8 to[16]) {
  u8 mixed[16];
  for (int k = 0; k < 16; k++) to[k] = from[k] ^ c->keys[k];
  for (u32 round = 1; round <= c->rounds; round++) {
    for (int k = 0; k < 16; k++) mixed[k] = c->box[to[(k + 4 * (k % 4)) % 16]];
    for (int k = 0; k < 16; k++) {
      const u8 *column = mixed + k / 4 * 4;
      u8 a = column[k % 4], b = column[(k + 1) % 4], all = column[0] ^ column[1] ^ column[2] ^ column[3];
      to[k] = (round < c->rounds ? (u8)(twice(a ^ b) ^ all ^ a) : a) ^ c->keys[16 * round + k];
    }
  }
}
/* GHASH. The highest bit of a number in GF(2^128) is its lowest power. */
static void add_blocks(u64 sum[2], const u64 h[2], kv_bytes data) {
  for (u64 i = 0; i < data.size; i += 16) {
    u8 block[16] = {0};
    memcpy(block, data.data + i, data.size - i < 16 ? data.size - i : 16);
    u64 x[2] = {sum[0] ^ big(block, 8), sum[1] ^ big(block + 8, 8)}, v[2] = {h[0], h[1]};
    sum[0] = sum[1] = 0;
    for (int bit = 0; bit < 128; bit++) {
      u64 added = 0 - (x[bit / 64] >> (63 - bit % 64) & 1), carried = 0 - (v[1] & 1);
      sum[0] ^= v[0] & added;
      sum[1] ^= v[1] & added;
      v[1] = v[1] >> 1 | v[0] << 63;
      v[0] = v[0] >> 1 ^ (carried & (u64)0xe1 << 56);
    }
  }
}
/* Decrypts `text` to equally many bytes. Returns false if the tag of 16 bytes does not match. */
static bool decrypt(kv_bytes key, const u8 *nonce, kv_bytes known, kv_bytes text, const u8 *tag, u8 *clear) {
  cipher c;
  u8 counter[16] = {0}, mask[16], sizes[16], wrong = 0;
  u64 sum[2] = {0, 0};
  expand_key(&c, key);
  encrypt_block(&c, counter, mask);
  u64 h[2] = {big(mask, 8), big(mask + 8, 8)};
  put_big(sizes, known.size * 8, 8);
  put_big(sizes + 8, text.size * 8, 8);
  add_blocks(sum, h, known);
  add_blocks(sum, h, text);
  add_blocks(sum, h, (kv_bytes){sizes, 16});
  memcpy(counter, nonce, 12);
  counter[15] = 1;
  encrypt_block(&c, counter, mask);
  for (int k = 0; k < 16; k++) wrong |= tag[k] ^ mask[k] ^ (u8)(sum[k / 8] >> (56 - k % 8 * 8));
  for (u64 i = 0; !wrong && i < text.size; i++) {
    if (i % 16 == 0) put_big(counter + 12, i / 16 + 2, 4);
    if (i % 16 == 0) encrypt_block(&c, counter, mask);
    clear[i] = text.data[i] ^ mask[i % 16];
  }
  return !wrong;
}
