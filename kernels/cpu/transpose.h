/* Words of tokens to rows of TILE tokens, and back. */

enum { TILE = 128 };

typedef uint16_t v8 __attribute__((vector_size(16)));
typedef int16_t v8_mask __attribute__((vector_size(16)));
typedef uint16_t v8_any __attribute__((vector_size(16), aligned(1), may_alias));
#define LOW8 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH8 4, 12, 5, 13, 6, 14, 7, 15

INLINE uint16_t word_at(const char *p) {
    uint16_t x;
    memcpy(&x, p, 2);
    return x;
}

/* rows of `words` words to out[word * TILE + row]. */
static void transpose(const char *rows, int64_t stride, int64_t count, int64_t words, uint16_t *out) {
    int64_t whole = count / 8 * 8, blocks = words / 8 * 8;
    for (int64_t t = 0; t < whole; t += 8)
        for (int64_t w = 0; w < blocks; w += 8) {
            v8 a[8], b[8];
            for (int i = 0; i < 8; i++) a[i] = *(const v8_any *)(rows + (t + i) * stride + 2 * w);
            /* Three rounds of interleaving rows i and i + 4. */
            for (int i = 0; i < 4; i++) {
                b[2 * i] = SHUFFLE(v8, v8_mask, a[i], a[i + 4], LOW8);
                b[2 * i + 1] = SHUFFLE(v8, v8_mask, a[i], a[i + 4], HIGH8);
            }
            for (int i = 0; i < 4; i++) {
                a[2 * i] = SHUFFLE(v8, v8_mask, b[i], b[i + 4], LOW8);
                a[2 * i + 1] = SHUFFLE(v8, v8_mask, b[i], b[i + 4], HIGH8);
            }
            for (int i = 0; i < 4; i++) {
                *(v8_any *)(out + (w + 2 * i) * TILE + t) = SHUFFLE(v8, v8_mask, a[i], a[i + 4], LOW8);
                *(v8_any *)(out + (w + 2 * i + 1) * TILE + t) = SHUFFLE(v8, v8_mask, a[i], a[i + 4], HIGH8);
            }
        }
    for (int64_t t = 0; t < count; t++)
        for (int64_t w = t < whole ? blocks : 0; w < words; w++) out[w * TILE + t] = word_at(rows + t * stride + 2 * w);
}

/* `words` rows of TILE words to `count` rows of words. */
static void transpose_back(const uint16_t *rows, int64_t count, int64_t words, char *to, int64_t stride) {
    int64_t whole = count / 8 * 8, blocks = words / 8 * 8;
    for (int64_t t = 0; t < whole; t += 8)
        for (int64_t w = 0; w < blocks; w += 8) {
            v8 a[8], b[8];
            for (int i = 0; i < 8; i++) a[i] = *(const v8_any *)(rows + (w + i) * TILE + t);
            for (int round = 0; round < 3; round++) {
                for (int i = 0; i < 4; i++) {
                    b[2 * i] = SHUFFLE(v8, v8_mask, a[i], a[i + 4], LOW8);
                    b[2 * i + 1] = SHUFFLE(v8, v8_mask, a[i], a[i + 4], HIGH8);
                }
                for (int i = 0; i < 8; i++) a[i] = b[i];
            }
            for (int i = 0; i < 8; i++) *(v8_any *)(to + (t + i) * stride + 2 * w) = a[i];
        }
    for (int64_t t = 0; t < count; t++)
        for (int64_t w = t < whole ? blocks : 0; w < words; w++) memcpy(to + t * stride + 2 * w, rows + w * TILE + t, 2);
}
