/* The norms of tokens in each head (formats/token_norms.py, norms_per_head). */

/* Loads LANES values, beginning at `x`. */
INLINE vf values_at(const char *x, int64_t dtype) {
    if (dtype == F32) return load((const float *)x);
    vi words = load_words((const uint16_t *)x);
    return dtype == BF16 ? (vf)(words << 16) : from_half(words);
}

/* The sum of squares of a row of values, as LANES partial sums. */
INLINE vf squares_of(const char *row, int64_t dim, int64_t dtype) {
    int64_t size = dtype == F32 ? 4 : 2, d = 0;
    vf sum = splat(0), other = splat(0);
    for (; d + 2 * LANES <= dim; d += 2 * LANES) {
        vf x = values_at(row + size * d, dtype), y = values_at(row + size * (d + LANES), dtype);
        sum += x * x;
        other += y * y;
    }
    for (; d + LANES <= dim; d += LANES) {
        vf x = values_at(row + size * d, dtype);
        sum += x * x;
    }
    if (d < dim) {
        char rest[4 * LANES] = {0};
        memcpy(rest, row + size * d, size * (dim - d));
        vf x = values_at(rest, dtype);
        sum += x * x;
    }
    return sum + other;
}

/* Stores the roots of the first `count` sums of LANES partial sums each. */
static __attribute__((noinline)) void store_roots(vf *squares, int64_t count, float *roots) {
    vf sums = square_root(sums_of(squares));
    memcpy(roots, &sums, sizeof(float) * count);
}

INLINE void norms_of(const RawSlots *call, int64_t layer, int64_t dtype) {
    for (int64_t h = 0; h < call->heads; h++) {
        float *norms = call->norms + (layer * call->heads + h) * call->tokens;
        const char *x = call->x.data + layer * call->x.batch + h * call->x.head;
        for (int64_t t = 0; t < call->tokens; t += LANES) {
            int64_t count = call->tokens - t < LANES ? call->tokens - t : LANES;
            vf squares[LANES];
            for (int64_t i = 0; i < LANES; i++)
                squares[i] = i < count ? squares_of(x + (t + i) * call->x.row, call->dim, dtype) : splat(0);
            store_roots(squares, count, norms + t);
        }
    }
}

static void layer_norms(const RawSlots *call, int64_t layer) {
    switch (call->dtype) {
        case F16: norms_of(call, layer, F16); break;
        case BF16: norms_of(call, layer, BF16); break;
        default: norms_of(call, layer, F32);
    }
}
