/* The mean of a page of tokens of one head (formats/key_mean.py). */

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

static void measure_page(const Encode *call, int64_t batch, int64_t head, int64_t page) {
    int64_t first = page * call->mean_tokens, left = call->tokens - first, count = left < call->mean_tokens ? left : call->mean_tokens;
    const char *x = row_of(&call->x, batch, head, first);
    float *out = (float *)row_of(&call->means, batch, head, page);
    /* Other dtypes are rare, so they share code. */
    if (call->dtype == BF16)
        page_mean(call, x, count, out, BF16);
    else
        page_mean(call, x, count, out, call->dtype);
}
