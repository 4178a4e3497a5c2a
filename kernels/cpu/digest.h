/* Blocks and stripes of XXH3-128 (Yann Collet, xxHash 0.8; spec/container.md says where it is used): a stripe is 64 bytes, in eight sums. */

enum { STRIPE = 64, BLOCK_STRIPES = 16, SUMS = STRIPE / 8 };

#if LEVEL >= 3
INLINE __m256i stripe_half(__m256i sums, const unsigned char *data, const unsigned char *secret) {
    __m256i values = _mm256_loadu_si256((const __m256i *)data);
    __m256i keys = _mm256_xor_si256(values, _mm256_loadu_si256((const __m256i *)secret));
    __m256i products = _mm256_mul_epu32(keys, _mm256_srli_epi64(keys, 32));
    return _mm256_add_epi64(sums, _mm256_add_epi64(products, _mm256_shuffle_epi32(values, 0x4e)));
}

INLINE __m256i scrambled_half(__m256i sums, const unsigned char *secret) {
    const __m256i prime = _mm256_set1_epi64x(0x9e3779b1);
    sums = _mm256_xor_si256(_mm256_xor_si256(sums, _mm256_srli_epi64(sums, 47)), _mm256_loadu_si256((const __m256i *)secret));
    __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(sums, 32), prime), 32);
    return _mm256_add_epi64(_mm256_mul_epu32(sums, prime), high);
}
#endif

/* Adds `blocks` blocks of BLOCK_STRIPES stripes to the sums, and then `stripes` stripes. A block's stripes begin at one place of the
   secret after the other, 8 bytes apart; after it, the sums are scrambled with the secret's bytes from `last` on. */
static void absorb(uint64_t *sums, const unsigned char *data, int64_t blocks, int64_t stripes, const unsigned char *secret, int64_t last) {
#if LEVEL >= 3
    __m256i low = _mm256_loadu_si256((const __m256i *)sums), high = _mm256_loadu_si256((const __m256i *)sums + 1);
    for (int64_t block = 0; block <= blocks; block++) {
        int64_t count = block < blocks ? BLOCK_STRIPES : stripes;
        for (int64_t n = 0; n < count; n++, data += STRIPE) {
            low = stripe_half(low, data, secret + 8 * n);
            high = stripe_half(high, data + 32, secret + 8 * n + 32);
        }
        if (block == blocks) break;
        low = scrambled_half(low, secret + last);
        high = scrambled_half(high, secret + last + 32);
    }
    _mm256_storeu_si256((__m256i *)sums, low);
    _mm256_storeu_si256((__m256i *)sums + 1, high);
#else
    for (int64_t block = 0; block <= blocks; block++) {
        int64_t count = block < blocks ? BLOCK_STRIPES : stripes;
        for (int64_t n = 0; n < count; n++, data += STRIPE)
            for (int i = 0; i < SUMS; i++) {
                uint64_t value, key;
                memcpy(&value, data + 8 * i, 8);
                memcpy(&key, secret + 8 * n + 8 * i, 8);
                key ^= value;
                sums[i ^ 1] += value;
                sums[i] += (key & 0xffffffffu) * (key >> 32);
            }
        if (block == blocks) break;
        for (int i = 0; i < SUMS; i++) {
            uint64_t key;
            memcpy(&key, secret + last + 8 * i, 8);
            sums[i] = (sums[i] ^ sums[i] >> 47 ^ key) * 0x9e3779b1u;
        }
    }
#endif
}
