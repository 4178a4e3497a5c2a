/* Statistics that encoding needs of a page of tokens of one head: the mean (formats/key_mean.py), or for minifloat the largest magnitude. */

typedef double vd __attribute__((vector_size(4 * LANES)));
typedef float vf_half __attribute__((vector_size(2 * LANES)));

/* Sums in binary64, of LANES channels at a time so that they stay in registers; sums of 16-bit values are exact. */
INLINE void page_mean(const Encode *call, const char *x, int64_t count, float *out, int64_t dtype) {
    enum { TOGETHER = LANES < 8 ? 2 : 4 };
    for (int64_t d = 0; d < call->codec->dim; d += TOGETHER * LANES) {
        int64_t left = (call->codec->dim - d) / LANES, here = left < TOGETHER ? left : TOGETHER;
        vd sums[2 * TOGETHER] = {0};
        const char *row = x;
        for (int64_t t = 0; t < count; t++, row += call->x.row)
            UNROLLED for (int64_t i = 0; i < TOGETHER; i++) {
                if (i >= here) continue;
                vf value = widened(row, d + i * LANES, dtype);
                vf_half halves[2];
                memcpy(halves, &value, sizeof value);
                sums[2 * i] += __builtin_convertvector(halves[0], vd);
                sums[2 * i + 1] += __builtin_convertvector(halves[1], vd);
            }
        for (int64_t i = 0; i < 2 * here; i++) {
            vf_half mean = __builtin_convertvector(sums[i] / (double)count, vf_half);
            memcpy(out + d + i * (LANES / 2), &mean, sizeof mean);
        }
    }
}

/* The largest magnitude of tokens that are encoded; infinite or NaN if one of their values is. */
INLINE void page_largest(const Encode *call, const char *x, const uint8_t *skipped, int64_t count, float *out, int64_t dtype) {
    int64_t bytes = call->codec->dim * (dtype == F32 ? 4 : 2);
    vi most[4] = {{0}, {0}, {0}, {0}};
    for (int64_t t = 0; t < count; t++, x += call->x.row) {
        if (skipped && skipped[t]) continue;
        for (int64_t at = 0; at < bytes; at += CACHE_LINE) {
            __builtin_prefetch(x + 8 * call->x.row + at, 0, 2);
            for (int64_t i = 0; i < CACHE_LINE / (4 * LANES); i++) {
                vi size = load_int((const int32_t *)(x + at) + i * LANES) & (dtype == F32 ? 0x7fffffff : 0x7fff7fff);
                most[i] = larger_sizes(most[i], size, dtype == F32);
            }
        }
    }
    for (int i = 1; i < 4; i++) most[0] = larger_sizes(most[0], most[i], dtype == F32);
    int32_t largest = 0;
    for (int i = 0; i < LANES; i++) {
        int32_t size = most[0][i], high = size >> 16, low = size & 0xffff;
        if (dtype != F32) size = high > low ? high : low;
        largest = size > largest ? size : largest;
    }
    if (dtype == F16)
        *out = half((uint16_t)largest);
    else {
        largest <<= dtype == BF16 ? 16 : 0;
        memcpy(out, &largest, sizeof largest);
    }
}

INLINE void measure_page_of(const Encode *call, const char *x, const uint8_t *skipped, int64_t count, float *out, int64_t dtype) {
    if (call->codec->family == MINIFLOAT)
        page_largest(call, x, skipped, count, out, dtype);
    else
        page_mean(call, x, count, out, dtype);
}

static void measure_page(const Encode *call, int64_t batch, int64_t head, int64_t page) {
    int64_t first = page * call->mean_tokens, left = call->tokens - first, count = left < call->mean_tokens ? left : call->mean_tokens;
    const char *x = row_of(&call->x, batch, head, first);
    const uint8_t *skipped = call->skipped ? call->skipped + batch * call->tokens + first : NULL;
    float *out = (float *)row_of(&call->means, batch, head, page);
    switch (call->dtype) {
        case F16: measure_page_of(call, x, skipped, count, out, F16); break;
        case BF16: measure_page_of(call, x, skipped, count, out, BF16); break;
        default: measure_page_of(call, x, skipped, count, out, F32);
    }
}
