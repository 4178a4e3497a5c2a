/* Transposes words of tokens to rows of TILE tokens, and back. */

/* The tokens of a tile, and of an encoder's tile: 64 tokens of 128 channels in float32 take 32 KiB, the size of a level-1 data cache. */
enum { TILE = 128, HALF_TILE = 64 };

typedef uint16_t v8 __attribute__((vector_size(16)));
typedef int16_t v8_mask __attribute__((vector_size(16)));
typedef uint64_t v2 __attribute__((vector_size(16)));
typedef uint16_t v8_any __attribute__((vector_size(16), aligned(1), may_alias));
#define LOW8 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH8 4, 12, 5, 13, 6, 14, 7, 15

INLINE uint16_t word_at(const char *p) {
    uint16_t x;
    memcpy(&x, p, 2);
    return x;
}

/* Loads 2 to 8 words into a vector, and sets the remaining ones to zero. The halves stay in registers, because a load of the whole vector
   would wait for stores of the halves. */
INLINE v8 load_row(const char *p, int64_t words) {
    if (words == 8) return *(const v8_any *)p;
    uint64_t first = 0, last = 0;
    if (words < 4) {
        memcpy(&first, p, 4);
        memcpy(&last, p + 2 * (words - 2), 4);
        return (v8)(v2){first | last << 16 * (words - 2)};
    }
    memcpy(&first, p, 8);
    memcpy(&last, p + 2 * (words - 4), 8);
    return (v8)(v2){first, words == 4 ? 0 : last >> 16 * (8 - words)};
}

INLINE void store_row(char *p, v8 row, int64_t words) {
    if (words == 8) {
        *(v8_any *)p = row;
        return;
    }
    char bytes[16];
    memcpy(bytes, &row, 16);
    memcpy(p, bytes, 8);
    memcpy(p + 2 * (words - 4), bytes + 2 * (words - 4), 8);
}

/* Three rounds of interleaving rows i and i + 4. */
INLINE void turn_words(v8 *a) {
    v8 b[8];
    UNROLLED for (int round = 0; round < 3; round++) {
        UNROLLED for (int i = 0; i < 4; i++) {
            b[2 * i] = SHUFFLE(v8, v8_mask, a[i], a[i + 4], LOW8);
            b[2 * i + 1] = SHUFFLE(v8, v8_mask, a[i], a[i + 4], HIGH8);
        }
        UNROLLED for (int i = 0; i < 8; i++) a[i] = b[i];
    }
}

/* Returns the first of eight words that begin at `w`, or for the last block that are the last eight, some of which belong to the previous
   block, too. If there are fewer than eight words, returns 0. */
INLINE int64_t block_at(int64_t w, int64_t words) { return w + 8 <= words ? w : words < 8 ? 0 : words - 8; }

/* Transposes rows of `words` words to out[word * TILE + row]. */
AS_WRITTEN static void transpose(const char *rows, int64_t stride, int64_t count, int64_t words, uint16_t *out) {
    int64_t whole = words < 2 ? 0 : count / 8 * 8, here = words < 8 ? words : 8;
    for (int64_t t = 0; t < whole; t += 8)
        for (int64_t w = 0; w < words; w += 8) {
            int64_t at = block_at(w, words);
            v8 a[8];
            for (int i = 0; i < 8; i++) a[i] = load_row(rows + (t + i) * stride + 2 * at, here);
            turn_words(a);
            for (int i = 0; i < here; i++) *(v8_any *)(out + (at + i) * TILE + t) = a[i];
        }
    for (int64_t t = whole; t < count; t++)
        for (int64_t w = 0; w < words; w++) out[w * TILE + t] = word_at(rows + t * stride + 2 * w);
}

/* Transposes `words` rows of HALF_TILE words to `count` rows of words. */
static void transpose_back(const uint16_t *rows, int64_t count, int64_t words, char *to, int64_t stride) {
    int64_t whole = words < 4 ? 0 : count / 8 * 8, here = words < 8 ? words : 8;
    for (int64_t t = 0; t < whole; t += 8)
        for (int64_t w = 0; w < words; w += 8) {
            int64_t at = block_at(w, words);
            v8 a[8] = {{0}};
            for (int i = 0; i < here; i++) a[i] = *(const v8_any *)(rows + (at + i) * HALF_TILE + t);
            turn_words(a);
            for (int i = 0; i < 8; i++) store_row(to + (t + i) * stride + 2 * at, a[i], here);
        }
    for (int64_t t = whole; t < count; t++)
        for (int64_t w = 0; w < words; w++) memcpy(to + t * stride + 2 * w, rows + w * HALF_TILE + t, 2);
}
