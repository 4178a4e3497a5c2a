/* The mean of a page of tokens of one head (formats/key_mean.py), and sums of squares for factors of channels (formats/channel_scale.py). */

typedef double vd __attribute__((vector_size(4 * LANES)));
typedef float vf_half __attribute__((vector_size(2 * LANES)));

/* Sums in binary64, of LANES channels at a time so that they stay in registers; sums of 16-bit values are exact. */
INLINE void page_mean(const Encode *call, const char *x, int64_t count, const float *factors, float *out, int64_t dtype) {
    enum { TOGETHER = LANES < 8 ? 2 : 4 };
    for (int64_t d = 0; d < call->codec->dim; d += TOGETHER * LANES) {
        int64_t left = (call->codec->dim - d) / LANES, here = left < TOGETHER ? left : TOGETHER;
        vd sums[2 * TOGETHER] = {0};
        const char *row = x;
        for (int64_t t = 0; t < count; t++, row += call->x.row)
            UNROLLED for (int64_t i = 0; i < TOGETHER; i++) {
                if (i >= here) continue;
                vf value = widened(row, d + i * LANES, dtype);
                if (factors) value /= load(factors + d + i * LANES);
                vf_half halves[2];
                memcpy(halves, &value, sizeof value);
                sums[2 * i] += __builtin_convertvector(halves[0], vd);
                sums[2 * i + 1] += __builtin_convertvector(halves[1], vd);
            }
        for (int64_t i = 0; i < 2 * here; i++) {
            vf_half mean = __builtin_convertvector(sums[i] / (double)count, vf_half) * call->share;
            memcpy(out + d + i * (LANES / 2), &mean, sizeof mean);
        }
    }
}

/* Adds up squares over the spans of a page of tokens: without the page's mean, and of whole values. Sums of a shorter last span are scaled up. */
INLINE void span_squares(const Encode *call, const char *x, int64_t count, const float *mean, double *out, int64_t dtype) {
    int64_t dim = call->codec->dim, spans = (call->tokens + SPAN - 1) / SPAN, whole = call->batch * call->heads * dim * spans;
    for (int64_t t = 0; t < count; t += SPAN, out++)
        for (int64_t d = 0; d < dim; d += LANES) {
            vd sums[4] = {0};
            for (int64_t i = t; i < t + SPAN && i < count; i++) {
                vf values[2] = {widened(x + i * call->x.row, d, dtype)};
                values[1] = values[0];
                values[0] -= load(mean + d);
                vf_half halves[4];
                memcpy(halves, values, sizeof values);
                UNROLLED for (int h = 0; h < 4; h++) {
                    vd value = __builtin_convertvector(halves[h], vd);
                    sums[h] += value * value;
                }
            }
            double all[2 * LANES], scale = count - t < SPAN ? (double)SPAN / (double)(count - t) : 1;
            memcpy(all, sums, sizeof all);
            ROLLED for (int64_t i = 0; i < 2 * LANES; i++) out[i / LANES * whole + (d + i % LANES) * spans] = all[i] * scale;
        }
}

INLINE void measure_page_of(const Encode *call, int64_t batch, int64_t head, int64_t page, int64_t dtype) {
    int64_t first = page * call->mean_tokens, left = call->tokens - first, count = left < call->mean_tokens ? left : call->mean_tokens;
    const char *x = row_of(&call->x, batch, head, first);
    const float *factors = call->factors.data ? (const float *)row_of(&call->factors, batch, head, 0) : NULL;
    float *mean = (float *)row_of(&call->means, batch, head, page);
    page_mean(call, x, count, factors, mean, dtype);
    int64_t spans = (call->tokens + SPAN - 1) / SPAN;
    double *squares = call->squares + (batch * call->heads + head) * call->codec->dim * spans + first / SPAN;
    if (call->squares) span_squares(call, x, count, mean, squares, dtype);
}

static void measure_page(const Encode *call, int64_t batch, int64_t head, int64_t page) {
    /* Other dtypes are rare, so they share code. */
    if (call->dtype == BF16)
        measure_page_of(call, batch, head, page, BF16);
    else
        measure_page_of(call, batch, head, page, call->dtype);
}
