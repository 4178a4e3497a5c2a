/* Vectors of one instruction set: LANES floats, by the vector extensions of GCC and Clang; the few intrinsics are all here. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if LEVEL >= 3
#include <immintrin.h>
#endif
#if LEVEL == 4
#define LANES 16
#elif LEVEL == 3
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))

/* A function whose vectors are written as such: GCC's own vectors of the loops for what remains would only make it larger. */
#ifdef __clang__
#define AS_WRITTEN
#else
#define AS_WRITTEN __attribute__((optimize("no-tree-loop-vectorize")))
#endif

/* Placed before a short loop with a constant number of rounds, so that its vectors stay in registers. */
#ifdef __clang__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

/* Placed before a loop that runs seldom, so that it stays small. */
#ifdef __clang__
#define ROLLED _Pragma("nounroll")
#else
#define ROLLED _Pragma("GCC unroll 1")
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef int16_t vw __attribute__((vector_size(4 * LANES)));
typedef uint8_t vb __attribute__((vector_size(LANES)));
typedef int8_t vb_mask __attribute__((vector_size(LANES)));
typedef float vf_any __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi_any __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int16_t vw_any __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * LANES), aligned(1), may_alias));

INLINE vf load(const float *p) { return *(const vf_any *)p; }
INLINE void store(float *p, vf x) { *(vf_any *)p = x; }
INLINE vi load_int(const int32_t *p) { return *(const vi_any *)p; }
INLINE void store_int(int32_t *p, vi x) { *(vi_any *)p = x; }

/* Loads words into the low bits of each lane. GCC converts whole vectors in two halves. */
INLINE vi load_words(const uint16_t *p) {
#if LEVEL == 4
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#else
    return __builtin_convertvector(*(const vh_any *)p, vi);
#endif
}

/* Bytes in the low bits of each lane. */
INLINE vi from_octets(vb bytes) {
#if LEVEL == 4
    return (vi)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif LEVEL == 3
    return (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
#else
    return __builtin_convertvector(bytes, vi);
#endif
}

INLINE vi load_octets(const uint8_t *p) {
    vb bytes;
    memcpy(&bytes, p, LANES);
    return from_octets(bytes);
}

INLINE void store_words(uint16_t *p, vi x) {
#if LEVEL == 4
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)x));
#else
    *(vh_any *)p = __builtin_convertvector(x, vh);
#endif
}

INLINE void store_octets(uint8_t *p, vi x) {
#if LEVEL == 4
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)x));
#else
    vb bytes = __builtin_convertvector(x, vb);
    memcpy(p, &bytes, LANES);
#endif
}

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vi splat_int(int32_t x) { return x - (vi){0}; }
INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }
INLINE vi to_int(vf x) { return __builtin_convertvector(x, vi); }
INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vi choose_int(vi mask, vi a, vi b) { return (mask & a) | (~mask & b); }
INLINE vf magnitude_of(vf x) { return (vf)((vi)x & 0x7fffffff); }

/* Selects a where x is greater than y, and b elsewhere. */
INLINE vf pick_above(vf x, vf y, vf a, vf b) {
#if LEVEL == 4
    return (vf)_mm512_mask_blend_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_GT_OQ), (__m512)b, (__m512)a);
#else
    return choose(x > y, a, b);
#endif
}

/* Returns level, plus step where x is greater than y. */
INLINE vi add_above(vf x, vf y, vi level, int32_t step) {
#if LEVEL == 4
    return (vi)_mm512_mask_add_epi32((__m512i)level, _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_GT_OQ), (__m512i)level, _mm512_set1_epi32(step));
#else
    return level + ((x > y) & step);
#endif
}

/* Returns the larger of two values, or b where either is NaN. */
INLINE vf larger(vf a, vf b) {
#if LEVEL == 4
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif LEVEL == 3
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

/* Returns the smaller of two values, or b where either is NaN. */
INLINE vf smaller(vf a, vf b) {
#if LEVEL == 4
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif LEVEL == 3
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return choose(a < b, a, b);
#endif
}

INLINE vi smaller_int(vi a, vi b) {
#if LEVEL == 4
    return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif LEVEL == 3
    return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b);
#else
    return choose_int(a < b, a, b);
#endif
}

/* Returns a * b + c, rounded only once if the processor can do so. */
INLINE vf product_and_sum(vf a, vf b, vf c) {
#if LEVEL == 4
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LEVEL == 3
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* Returns x / divisor, correctly rounded, for values of at most 11 significant bits, except that 0 loses its sign. The reciprocal is that
   of the divisor, which is at least 2^-80. If the reciprocal is 0, every quotient is 0. */
INLINE vf short_quotient(vf x, vf divisor, vf reciprocal) {
#if LEVEL >= 3
    vf quotient = x * reciprocal;
    return product_and_sum(product_and_sum(-quotient, divisor, x), reciprocal, quotient);
#else
    return (vf)((vi)(x / divisor) & (reciprocal > 0.f));
#endif
}

/* Return the larger and the smaller of two words. */
INLINE vw larger_word(vw a, vw b) {
#if LEVEL == 4
    return (vw)_mm512_max_epi16((__m512i)a, (__m512i)b);
#elif LEVEL == 3
    return (vw)_mm256_max_epi16((__m256i)a, (__m256i)b);
#else
    vw mask = a > b;
    return (mask & a) | (~mask & b);
#endif
}

INLINE vw smaller_word(vw a, vw b) {
#if LEVEL == 4
    return (vw)_mm512_min_epi16((__m512i)a, (__m512i)b);
#elif LEVEL == 3
    return (vw)_mm256_min_epi16((__m256i)a, (__m256i)b);
#else
    vw mask = a < b;
    return (mask & a) | (~mask & b);
#endif
}

INLINE vw load_word_pairs(const void *p) { return *(const vw_any *)p; }
INLINE void store_word_pairs(void *p, vw x) { *(vw_any *)p = x; }
INLINE vw splat_word(int32_t x) { return (vw){0} + (int16_t)x; }

/* Splats the four words of a block to vectors, or those of two blocks of 16 to their lanes. */
INLINE void split_blocks(const void *first, const void *second, vw *a, vw *b, vw *c, vw *d) {
#if LEVEL >= 3
    int64_t words[2];
    memcpy(words, first, 8);
    memcpy(words + 1, second, 8);
#endif
#if LEVEL == 4
    __m512i both = _mm512_mask_set1_epi64(_mm512_set1_epi64(words[0]), 0xf0, words[1]);
    *a = (vw)_mm512_shuffle_epi8(both, _mm512_set1_epi16(0x100)), *b = (vw)_mm512_shuffle_epi8(both, _mm512_set1_epi16(0x302));
    *c = (vw)_mm512_shuffle_epi8(both, _mm512_set1_epi16(0x504)), *d = (vw)_mm512_shuffle_epi8(both, _mm512_set1_epi16(0x706));
#elif LEVEL == 3
    __m256i both = _mm256_set1_epi64x(words[0]);
    *a = (vw)_mm256_shuffle_epi8(both, _mm256_set1_epi16(0x100)), *b = (vw)_mm256_shuffle_epi8(both, _mm256_set1_epi16(0x302));
    *c = (vw)_mm256_shuffle_epi8(both, _mm256_set1_epi16(0x504)), *d = (vw)_mm256_shuffle_epi8(both, _mm256_set1_epi16(0x706));
#else
    const int16_t *words = first;
    *a = splat_word(words[0]), *b = splat_word(words[1]), *c = splat_word(words[2]), *d = splat_word(words[3]);
    (void)second;
#endif
}

/* Returns whether a word of a is below that of b. */
INLINE int any_word_below(vw a, vw b) {
#if LEVEL == 4
    return _mm512_cmplt_epi16_mask((__m512i)a, (__m512i)b) != 0;
#elif LEVEL == 3
    return _mm256_movemask_epi8((__m256i)(a < b)) != 0;
#else
    uint64_t mask[2];
    vw below = a < b;
    memcpy(mask, &below, sizeof below);
    return (mask[0] | mask[1]) != 0;
#endif
}

/* A table of 128 words that increase by at most 8 in all, as it is looked up. */
#if LEVEL == 4
typedef struct {
    int16_t even[64], odd[64];
} Staircase;
#else
typedef struct {
    int16_t bottom, edge[8];
} Staircase;
#endif

static void make_staircase(const uint16_t *table, Staircase *out) {
#if LEVEL == 4
    for (int i = 0; i < 64; i++) out->even[i] = (int16_t)table[2 * i], out->odd[i] = (int16_t)table[2 * i + 1];
#else
    out->bottom = (int16_t)table[0];
    for (int step = 0, i = 0; step < 8; step++) {
        while (i < 128 && table[i] <= table[0] + step) i++;
        out->edge[step] = (int16_t)i;
    }
#endif
}

/* Looks up the low 7 bits of words that are not negative. */
INLINE vw on_staircase(const Staircase *table, vw x) {
#if LEVEL == 4
    __m512i half = _mm512_srli_epi16((__m512i)x, 1);
    __m512i even = _mm512_permutex2var_epi16(_mm512_loadu_si512(table->even), half, _mm512_loadu_si512(table->even + 32));
    __m512i odd = _mm512_permutex2var_epi16(_mm512_loadu_si512(table->odd), half, _mm512_loadu_si512(table->odd + 32));
    return (vw)_mm512_mask_blend_epi16(_mm512_test_epi16_mask((__m512i)x, _mm512_set1_epi16(1)), even, odd);
#else
    vw at = x & 127, result = splat_word(table->bottom);
    UNROLLED for (int i = 0; i < 8; i++) result -= (vw)(at >= table->edge[i]);
    return result;
#endif
}

/* Returns the nearest integer, ties to even, for magnitudes below 2^22. */
INLINE vi nearest_int(vf x) {
#if LEVEL == 4
    return (vi)_mm512_cvtps_epi32((__m512)x);
#elif LEVEL == 3
    return (vi)_mm256_cvtps_epi32((__m256)x);
#else
    const vf magic = splat(12582912.f); /* 1.5 * 2^23: adding it rounds to an integer */
    return (vi)(x + magic) - (vi)magic;
#endif
}

/* Returns whether every lane of a mask is set. */
INLINE int all_of(vi mask) {
#if LEVEL == 4
    return _mm512_movepi32_mask((__m512i)mask) == 0xffff;
#elif LEVEL == 3
    return _mm256_movemask_ps((__m256)mask) == 0xff;
#else
    int32_t all = -1;
    for (int i = 0; i < LANES; i++) all &= mask[i];
    return all != 0;
#endif
}

INLINE vf square_root(vf x) {
#if LEVEL == 4
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif LEVEL == 3
    return (vf)_mm256_sqrt_ps((__m256)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = sqrtf(x[i]);
    return x;
#endif
}

/* Returns 1 / x of a positive number, within a relative error of 2^-11. */
INLINE vf nearly_reciprocal(vf x) {
#if LEVEL == 4
    return (vf)_mm512_rcp14_ps((__m512)x);
#elif LEVEL == 3
    return (vf)_mm256_rcp_ps((__m256)x);
#else
    return 1.f / x;
#endif
}

/* Returns 1 / sqrt(x) of a positive number from an estimate and a Newton step, within a relative error of 2^-21. */
INLINE vf reciprocal_root(vf x) {
#if LEVEL >= 3
#if LEVEL == 4
    vf near = (vf)_mm512_rsqrt14_ps((__m512)x);
#else
    vf near = (vf)_mm256_rsqrt_ps((__m256)x);
#endif
    return near * (1.5f - .5f * x * near * near);
#else
    return 1.f / square_root(x);
#endif
}

/* An integer from 0 to `most`. */
INLINE vi bounded(vi x, int32_t most) {
    x = choose_int(x < 0, splat_int(0), x);
    return choose_int(x > most, splat_int(most), x);
}

#ifdef __clang__
#define SHUFFLE(vector, integer, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(vector, integer, a, b, ...) __builtin_shuffle(a, b, (integer){__VA_ARGS__})
#endif

#if LANES == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define APART 0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15
#define SWAPPED 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7
#define LOW_OF_FOUR 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define HIGH_OF_FOUR 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#elif LANES == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#define APART 0, 2, 4, 6, 1, 3, 5, 7
#define SWAPPED 4, 5, 6, 7, 0, 1, 2, 3
#define LOW_OF_FOUR 0, 8, 1, 9, 4, 12, 5, 13
#define HIGH_OF_FOUR 2, 10, 3, 11, 6, 14, 7, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#define APART 0, 2, 1, 3
#define SWAPPED 2, 3, 0, 1
#define LOW_OF_FOUR 0, 4, 1, 5
#define HIGH_OF_FOUR 2, 6, 3, 7
#endif

/* Reduces LANES vectors to their sums, in order. */
INLINE vf sums_of(vf *x) {
    for (int n = LANES; n > 1; n /= 2)
        for (int i = 0; i < n / 2; i++)
            x[i] = SHUFFLE(vf, vi, x[2 * i], x[2 * i + 1], EVEN) + SHUFFLE(vf, vi, x[2 * i], x[2 * i + 1], ODD);
    return x[0];
}

/* The same for maxima. */
INLINE vf maxima_of(vf *x) {
    for (int n = LANES; n > 1; n /= 2)
        for (int i = 0; i < n / 2; i++)
            x[i] = larger(SHUFFLE(vf, vi, x[2 * i], x[2 * i + 1], EVEN), SHUFFLE(vf, vi, x[2 * i], x[2 * i + 1], ODD));
    return x[0];
}

/* The same for minima. */
INLINE vf minima_of(vf *x) {
    for (int n = LANES; n > 1; n /= 2)
        for (int i = 0; i < n / 2; i++)
            x[i] = smaller(SHUFFLE(vf, vi, x[2 * i], x[2 * i + 1], EVEN), SHUFFLE(vf, vi, x[2 * i], x[2 * i + 1], ODD));
    return x[0];
}

/* The same for the minima of both halves' words. */
INLINE vi word_minima_of(vi *x) {
    for (int n = LANES; n > 1; n /= 2)
        for (int i = 0; i < n / 2; i++)
            x[i] = (vi)smaller_word((vw)SHUFFLE(vi, vi, x[2 * i], x[2 * i + 1], EVEN), (vw)SHUFFLE(vi, vi, x[2 * i], x[2 * i + 1], ODD));
    return x[0];
}

INLINE float sum_of(vf x) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += x[i];
    return sum;
}

INLINE int is_finite(vf x) { return all_of(x * 0.f == 0.f); }

INLINE float largest_of(vf x) {
    float found = x[0];
    for (int i = 1; i < LANES; i++) found = x[i] > found ? x[i] : found;
    return found;
}

/* Converts binary16 in the low bits of each lane, exactly, including infinities and NaN. */
INLINE vf from_half(vi x) {
#if LEVEL == 4
    return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)x));
#elif LEVEL == 3
    vh words = __builtin_convertvector(x, vh);
    return (vf)_mm256_cvtph_ps((__m128i)words);
#else
    vf magnitude = (vf)((x & 0x7fff) << 13) * 0x1p112f;
    return (vf)((vi)magnitude | (((x & 0x7c00) == 0x7c00) & 0x7f800000) | (x & 0x8000) << 16);
#endif
}

/* The same for words in memory. */
INLINE vf load_half(const uint16_t *p) {
#if LEVEL == 4
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif LEVEL == 3
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    return from_half(load_words(p));
#endif
}

INLINE float half(uint16_t x) {
    uint32_t bits = (uint32_t)(x & 0x7fff) << 13;
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude *= 0x1p112f;
    memcpy(&bits, &magnitude, 4);
    bits |= ((x & 0x7c00) == 0x7c00 ? 0x7f800000u : 0) | (uint32_t)(x & 0x8000) << 16;
    memcpy(&magnitude, &bits, 4);
    return magnitude;
}

/* Returns e^x for x <= 0, within 2 units in the last place (Cephes' polynomial). The result is exactly 0 for x < -87, including minus
   infinity, and NaN for NaN. */
INLINE vf exponential(vf x) {
    const vf magic = splat(12582912.f); /* 1.5 * 2^23: adding it rounds to an integer */
    vf rounded = x * 1.44269504f + magic, n = rounded - magic;
    vf rest = x - n * 0.693359375f - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * rest + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.f;
    /* Far below -87, these do not fit and are not used. Unsigned numbers wrap around. */
    vf power = (vf)(((vu)rounded - (vu)magic + 127) << 23);
    return (vf)((vi)(p * power) & ~(x < -87.f));
}

/* 2^x: 0 below -126, infinite for x >= 128, NaN for NaN. Cephes' polynomial. */
INLINE vf power_of_two(vf x) {
#if LEVEL == 4
    vf rounded = (vf)_mm512_roundscale_ps((__m512)x, 0), rest = (vf)_mm512_reduce_ps((__m512)x, 0);
#else
    const vf magic = splat(12582912.f);
    vf bounded = choose(x < -126.f, splat(-126.f), choose(x > 127.f, smaller(x - 1.f, splat(127)), x));
    vf rounded = bounded + magic, rest = bounded - (rounded - magic);
#endif
    vf p = splat(1.535336188319500e-4f);
    p = product_and_sum(p, rest, splat(1.339887440266574e-3f));
    p = product_and_sum(p, rest, splat(9.618437357674640e-3f));
    p = product_and_sum(p, rest, splat(5.550332471162809e-2f));
    p = product_and_sum(p, rest, splat(2.402264791363012e-1f));
    p = product_and_sum(p, rest, splat(6.931472028550421e-1f));
    p = product_and_sum(p, rest, splat(1.f));
#if LEVEL == 4
    return (vf)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_NLT_UQ), (__m512)p, (__m512)rounded);
#else
    vf power = p * (vf)(((vi)rounded - (vi)magic + 127) << 23);
    power = choose(x > 127.f, power * choose(x >= 128.f, splat(INFINITY), splat(2.f)), power);
    return (vf)((vi)power & ~(x < -126.f));
#endif
}

/* Maximum number of entries of tables that are looked up in registers. */
#define MAX_IN_REGISTERS (LEVEL == 4 ? 128 : LEVEL == 3 ? 16 : 0)

/* The minimum number of entries of a table. */
enum { MIN_ENTRIES = 16 };

/* Returns data[index]. `entries` is a power of two, at least 16, and greater than every index. */
INLINE vf lookup(const float *data, int64_t entries, vi index) {
#if LEVEL == 4
    __m512i at = (__m512i)index;
    if (entries == 16) return (vf)_mm512_permutexvar_ps(at, _mm512_loadu_ps(data));
    if (entries == 32) return (vf)_mm512_permutex2var_ps(_mm512_loadu_ps(data), at, _mm512_loadu_ps(data + 16));
    if (entries <= 128) {
        __m512 low = _mm512_permutex2var_ps(_mm512_loadu_ps(data), at, _mm512_loadu_ps(data + 16));
        __m512 high = _mm512_permutex2var_ps(_mm512_loadu_ps(data + 32), at, _mm512_loadu_ps(data + 48));
        low = _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(at, _mm512_set1_epi32(32)), high);
        if (entries == 64) return (vf)low;
        __m512 third = _mm512_permutex2var_ps(_mm512_loadu_ps(data + 64), at, _mm512_loadu_ps(data + 80));
        __m512 fourth = _mm512_permutex2var_ps(_mm512_loadu_ps(data + 96), at, _mm512_loadu_ps(data + 112));
        third = _mm512_mask_mov_ps(third, _mm512_test_epi32_mask(at, _mm512_set1_epi32(32)), fourth);
        return (vf)_mm512_mask_mov_ps(low, _mm512_test_epi32_mask(at, _mm512_set1_epi32(64)), third);
    }
    return (vf)_mm512_i32gather_ps(at, data, 4);
#elif LEVEL == 3
    __m256i at = (__m256i)index;
    if (entries == 16) {
        __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(data), at), high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(data + 8), at);
        return (vf)_mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(at, 28));
    }
    return (vf)_mm256_i32gather_ps(data, at, 4);
#else
    vf found;
    for (int i = 0; i < LANES; i++) found[i] = data[index[i]];
    (void)entries;
    return found;
#endif
}

/* Four floats from data[index[0]] on, four from data[index[4]] on, and so on. */
INLINE vf load_fours(const float *data, const int32_t *index) {
#if LEVEL >= 3
    __m256 found = _mm256_castps128_ps256(_mm_loadu_ps(data + (int64_t)index[0]));
    found = _mm256_insertf128_ps(found, _mm_loadu_ps(data + (int64_t)index[4]), 1);
#if LEVEL == 4
    __m256 next = _mm256_castps128_ps256(_mm_loadu_ps(data + (int64_t)index[8]));
    next = _mm256_insertf128_ps(next, _mm_loadu_ps(data + (int64_t)index[12]), 1);
    return (vf)_mm512_insertf32x8(_mm512_castps256_ps512(found), next, 1);
#else
    return (vf)found;
#endif
#else
    return load(data + (int64_t)index[0]);
#endif
}
