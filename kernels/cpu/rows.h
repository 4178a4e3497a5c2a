/* Converts a tile of floats [channel][TILE] to rows of values of any dtype, [token][channel] as in a torch tensor. */

/* The lane orders that interleave the lower and the upper halves of two vectors: log2(LANES) rounds of both transpose LANES vectors. */

#if LANES == 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif

/* Rounds to the nearest bfloat16 or binary16, ties to even, in the low bits of each lane; as in torch, NaN becomes a quiet NaN. */
INLINE vi to_bfloat(vf x) {
    vu bits = (vu)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = (vu)(x != x);
    return (vi)((rounded & ~nan) | (0x7fc0 & nan));
}

INLINE vi to_half(vf x) {
#if LEVEL == 4
    vi rounded = (vi)_mm512_cvtepu16_epi32(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    return choose_int(x != x, (rounded & 0x8000) | 0x7e00, rounded);
#elif LEVEL == 3
    vi rounded = __builtin_convertvector((vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT), vi);
    return choose_int(x != x, (rounded & 0x8000) | 0x7e00, rounded);
#else
    vi bits = (vi)x, sign = (vi)((vu)bits >> 16) & 0x8000, size = bits & 0x7fffffff;
    vi normal = (vi)((vu)size + 0xfff + ((vu)size >> 13 & 1) - (112u << 23)) >> 13;
    /* Below 2^-14, an addition rounds to multiples of 2^-24. */
    vi small = (vi)((vf)size + .5f) - (vi)splat(.5f);
    vi is_small = size < 0x38800000, is_large = size >= 0x477ff000, is_nan = size > 0x7f800000;
    vi found = (small & is_small) | (normal & ~is_small);
    found = (found & ~is_large) | (0x7c00 & is_large);
    return sign | (found & ~is_nan) | (0x7e00 & is_nan);
#endif
}

/* Rounds numbers that are not NaN to binary16 and widens them again; `bits` receives the bits of binary16. */
INLINE vf rounded_to_half(vf x, vi *bits) {
#if LEVEL == 4
    __m256i words = _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    *bits = (vi)_mm512_cvtepu16_epi32(words);
    return (vf)_mm512_cvtph_ps(words);
#else
    *bits = to_half(x);
    return from_half(*bits);
#endif
}

/* Two values in the halves of each lane. */
INLINE vf paired(vf low, vf high, int64_t dtype) {
    return (vf)(dtype == BF16 ? to_bfloat(low) | to_bfloat(high) << 16 : to_half(low) | to_half(high) << 16);
}

/* Transposes LANES vectors of LANES values. */
INLINE void turn(vf *a) {
    vf b[LANES];
    for (int n = 1; n < LANES; n *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            b[2 * i] = SHUFFLE(vf, vi, a[i], a[i + LANES / 2], LOW);
            b[2 * i + 1] = SHUFFLE(vf, vi, a[i], a[i + LANES / 2], HIGH);
        }
        for (int i = 0; i < LANES; i++) a[i] = b[i];
    }
}

/* Copies without using the processor's caches, for results that are larger than the caches. */
INLINE void copy_past(char *to, const char *from, int64_t bytes) {
#if LEVEL >= 3
    if (((uintptr_t)to | (uintptr_t)bytes) % 64 == 0) {
#if LEVEL == 4
        for (int64_t i = 0; i < bytes; i += 64) _mm512_stream_si512((void *)(to + i), _mm512_loadu_si512(from + i));
#else
        for (int64_t i = 0; i < bytes; i += 32) _mm256_stream_si256((void *)(to + i), _mm256_loadu_si256((const void *)(from + i)));
#endif
        return;
    }
#endif
    memcpy(to, from, bytes);
}

INLINE void finish_copies(void) {
#if LEVEL >= 3
    _mm_sfence();
#endif
}

/* The destination of rows of values. */
typedef struct {
    char *to;
    int64_t stride, dtype, past_caches;
} Rows;

/* Transposes `dim` rows of TILE floats to `count` rows of `dim` values. One step handles as many tokens as a vector has floats, and as many
   channels as it has values of the dtype. `spare` has room for the rows of these tokens. */
INLINE void write_rows_of(const float *tile, int64_t dim, int64_t count, char *spare, const Rows *rows, int64_t dtype) {
    int64_t each = dtype == F32 ? 1 : 2, size = 4 / each, bytes = size * dim;
    for (int64_t t = 0; t < count; t += LANES) {
        for (int64_t d = 0; d < dim; d += each * LANES) {
            int64_t left = dim - d < each * LANES ? dim - d : each * LANES;
            vf a[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                const float *row = tile + (d + each * i) * TILE + t;
                vf first = each * i < left ? load(row) : splat(0);
                a[i] = each == 1 ? first : paired(first, each * i + 1 < left ? load(row + TILE) : splat(0), dtype);
            }
            turn(a);
            for (int64_t i = 0; i < LANES; i++) {
                char *to = spare + i * bytes + size * d;
                if (left == each * LANES)
                    store_int((int32_t *)to, (vi)a[i]);
                else
                    memcpy(to, &a[i], size * left);
            }
        }
        int64_t tokens = count - t < LANES ? count - t : LANES, whole = rows->stride == bytes;
        for (int64_t i = 0; i < (whole ? 1 : tokens); i++) {
            char *to = rows->to + (t + i) * rows->stride;
            const char *from = spare + i * bytes;
            int64_t some = whole ? tokens * bytes : bytes;
            if (rows->past_caches)
                copy_past(to, from, some);
            else
                memcpy(to, from, some);
        }
    }
}

static void write_rows(const float *tile, int64_t dim, int64_t count, float *spare, const Rows *rows) {
    switch (rows->dtype) {
        case F32: write_rows_of(tile, dim, count, (char *)spare, rows, F32); break;
        case BF16: write_rows_of(tile, dim, count, (char *)spare, rows, BF16); break;
        default: write_rows_of(tile, dim, count, (char *)spare, rows, F16);
    }
}
