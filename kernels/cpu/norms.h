/* The norms of tokens in each head (formats/token_norms.py, norms_per_head), and their largest magnitudes. */

/* Loads LANES values, beginning at `x`. */
INLINE vf values_at(const char *x, int64_t dtype) {
    if (dtype == F32) return load((const float *)x);
    vi words = load_words((const uint16_t *)x);
    return dtype == BF16 ? (vf)(words << 16) : from_half(words);
}

/* The sum of squares of a row of values, as LANES partial sums, or zeros unless `squared`. Lanes of `largest`, or both halves of them if
   values have 16 bits, receive the bits of magnitudes, the largest of which is that of the row. */
INLINE vf squares_of(const char *row, int64_t dim, int64_t dtype, int squared, vi *largest) {
    int64_t size = dtype == F32 ? 4 : 2, d = 0;
    int32_t magnitude = dtype == F32 ? 0x7fffffff : 0x7fff7fff;
    vf sum = splat(0), other = splat(0);
    vi most = splat_int(0);
    for (; d + 2 * LANES <= dim; d += 2 * LANES) {
        vi first = load_int((const int32_t *)(row + size * d)), second = first;
        if (dtype == F32) second = load_int((const int32_t *)(row + size * (d + LANES)));
        most = larger_sizes(most, first & magnitude, dtype == F32);
        if (dtype == F32) most = larger_sizes(most, second & magnitude, 1);
        if (!squared) continue;
        vf x = value_of((vu)first, 0, dtype), y = value_of((vu)second, 1, dtype);
        sum += x * x;
        other += y * y;
    }
    for (; d < dim; d += LANES) {
        char rest[4 * LANES] = {0};
        memcpy(rest, row + size * d, size * (dim - d < LANES ? dim - d : LANES));
        vf x = values_at(rest, dtype);
        sum += x * x;
        most = larger_sizes(most, load_int((const int32_t *)rest) & magnitude, dtype == F32);
    }
    *largest = most;
    return sum + other;
}

/* Stores the roots of the first `count` sums of LANES partial sums each. */
static __attribute__((noinline)) void store_roots(vf *squares, int64_t count, float *roots) {
    vf sums = square_root(sums_of(squares));
    memcpy(roots, &sums, sizeof(float) * count);
}

/* Stores the largest magnitudes of the first `count` rows, each of which is the result of squares_of. */
static __attribute__((noinline)) void store_largest(vi *most, int64_t count, float *largest, int64_t dtype) {
    for (int64_t n = LANES; n > 1; n /= 2)
        for (int64_t i = 0; i < n / 2; i++)
            most[i] = larger_sizes(SHUFFLE(vi, vi, most[2 * i], most[2 * i + 1], EVEN), SHUFFLE(vi, vi, most[2 * i], most[2 * i + 1], ODD),
                                   dtype == F32);
    vi bits = dtype == F32 ? most[0] : larger_sizes(most[0], most[0] << 16, 0);
    vf values = dtype == F32 ? (vf)bits : value_of((vu)bits, 1, dtype);
    memcpy(largest, &values, sizeof(float) * count);
}

INLINE void norms_of(const RawSlots *call, int64_t layer, int64_t dtype, int squared) {
    for (int64_t h = 0; h < call->heads; h++) {
        int64_t first = (layer * call->heads + h) * call->tokens;
        const char *x = call->x.data + layer * call->x.batch + h * call->x.head;
        for (int64_t t = 0; t < call->tokens; t += LANES) {
            int64_t count = call->tokens - t < LANES ? call->tokens - t : LANES;
            vf squares[LANES];
            vi most[LANES];
            for (int64_t i = 0; i < LANES; i++) {
                squares[i] = splat(0), most[i] = splat_int(0);
                if (i < count) squares[i] = squares_of(x + (t + i) * call->x.row, call->dim, dtype, squared, &most[i]);
            }
            if (squared) store_roots(squares, count, call->norms + first + t);
            if (call->largest) store_largest(most, count, call->largest + first + t, dtype);
        }
    }
}

static void layer_norms(const RawSlots *call, int64_t layer) {
    /* Other dtypes are rarer, and magnitudes alone need no conversion, so they share code. */
    if (call->dtype == BF16 && call->norms)
        norms_of(call, layer, BF16, 1);
    else
        norms_of(call, layer, call->dtype, call->norms != NULL);
}
