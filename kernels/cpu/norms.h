/* The norms of tokens over all heads (formats/raw_positions.py, norms_of). */

/* LANES values from `x` on. */
INLINE vf values_at(const char *x, int64_t dtype) {
    if (dtype == F32) return load((const float *)x);
    vi words = load_words((const uint16_t *)x);
    return dtype == BF16 ? (vf)(words << 16) : from_half(words);
}

INLINE float sum_of_squares(const char *row, int64_t dim, int64_t dtype) {
    int64_t size = dtype == F32 ? 4 : 2, d = 0;
    vf sum = splat(0);
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
    return sum_of(sum);
}

INLINE void norms_of(const RawSlots *call, int64_t layer, int64_t dtype) {
    for (int64_t t = 0; t < call->tokens; t++) {
        float sum = 0;
        for (int64_t h = 0; h < call->heads; h++)
            sum += sum_of_squares(call->x.data + layer * call->x.batch + h * call->x.head + t * call->x.row, call->dim, dtype);
        call->norms[layer * call->tokens + t] = sqrtf(sum);
    }
}

static void layer_norms(const RawSlots *call, int64_t layer) {
    switch (call->dtype) {
        case F16: norms_of(call, layer, F16); break;
        case BF16: norms_of(call, layer, BF16); break;
        default: norms_of(call, layer, F32);
    }
}
