/* klt: from the coded frame to the original one, a product with the matrix of each head. */

enum { CHANNELS_AT_ONCE = 8 };

/* `count` channels from `first` on of tokens [t, t + LANES), of which [low, high) have this matrix. */
INLINE void klt_products(const float *matrix, int64_t dim, int64_t first, int64_t count, int64_t low, int64_t high, const float *tile, float *to) {
    vf sum[CHANNELS_AT_ONCE];
    for (int64_t c = 0; c < count; c++) sum[c] = splat(0);
    for (int64_t j = 0; j < dim; j++) {
        vf value = load(tile + j * TILE);
        for (int64_t c = 0; c < count; c++) sum[c] += matrix[j * dim + first + c] * value;
    }
    for (int64_t c = 0; c < count; c++) {
        float *row = to + (first + c) * TILE;
        if (high - low == LANES)
            store(row, sum[c]);
        else
            for (int64_t i = low; i < high; i++) row[i] = sum[c][i];
    }
}

static void klt_original(const Codec *codec, const Loaded *in, float *tile, float *spare) {
    int64_t dim = codec->dim;
    for (int64_t run = 0; run < in->runs;) {
        BasisTokens own = basis_tokens(in, &run);
        const float *matrix = own.rows + codec->matrix_place;
        for (int64_t t = own.at / LANES * LANES, end = own.at + own.count; t < end; t += LANES) {
            int64_t low = t < own.at ? own.at - t : 0, high = end - t < LANES ? end - t : LANES, c = 0;
            for (; c + CHANNELS_AT_ONCE <= dim; c += CHANNELS_AT_ONCE)
                klt_products(matrix, dim, c, CHANNELS_AT_ONCE, low, high, tile + t, spare + t);
            for (; c < dim; c++) klt_products(matrix, dim, c, 1, low, high, tile + t, spare + t);
        }
    }
    memcpy(tile, spare, sizeof(float) * dim * TILE);
}
