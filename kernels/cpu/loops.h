/* The loops that all codecs share: scores of a tile of keys, the running softmax, sums of a tile of values. */

/* Number of vectors of tokens that are processed at once. Four queries then have 16 sums in the 32 registers of AVX-512, or 8 in the 16
   registers of AVX2. That is enough independent multiply-adds to hide their latency. */
#define TOKEN_BLOCKS (LEVEL == 4 ? 4 : 2)

/* Computes scores [query][TILE] as q [query][dim] times tile [dim][TILE]. */
INLINE void tile_scores(const float *q, int queries, int64_t dim, const float *tile, float *scores) {
    for (int t = 0; t < TILE; t += TOKEN_BLOCKS * LANES) {
        vf sum[4][TOKEN_BLOCKS];
        for (int r = 0; r < queries; r++)
            for (int b = 0; b < TOKEN_BLOCKS; b++) sum[r][b] = splat(0);
        for (int64_t d = 0; d < dim; d++)
            for (int b = 0; b < TOKEN_BLOCKS; b++) {
                vf x = load(tile + d * TILE + t + b * LANES);
                for (int r = 0; r < queries; r++) sum[r][b] += q[r * dim + d] * x;
            }
        for (int r = 0; r < queries; r++)
            for (int b = 0; b < TOKEN_BLOCKS; b++) store(scores + r * TILE + t + b * LANES, sum[r][b]);
    }
}

/* Processes `rows` channels of the tile at once. Tokens run along vectors, so each pair of a query and a channel has a vector of partial
   sums. LANES of these vectors are added up together, which takes fewer steps than one after the other. */
INLINE void tile_values_rows(const float *weights, int queries, int64_t dim, const float *tile, int64_t first, int rows, float *sums) {
    vf sum[LANES];
    float found[LANES];
    for (int i = 0; i < LANES; i++) sum[i] = splat(0);
    for (int t = 0; t < TILE; t += LANES) {
        vf weight[4];
        for (int r = 0; r < queries; r++) weight[r] = load(weights + r * TILE + t);
        for (int d = 0; d < rows; d++) {
            vf x = load(tile + (first + d) * TILE + t);
            for (int r = 0; r < queries; r++) sum[r * rows + d] += weight[r] * x;
        }
    }
    store(found, sums_of(sum));
    for (int r = 0; r < queries; r++)
        for (int d = 0; d < rows; d++) sums[r * dim + first + d] += found[r * rows + d];
}

/* Adds weights [query][TILE] times tile [dim][TILE] to sums [query][dim]. */
INLINE void tile_values(const float *weights, int queries, int64_t dim, const float *tile, float *sums) {
    int64_t d = 0;
    for (; d + LANES / queries <= dim; d += LANES / queries) tile_values_rows(weights, queries, dim, tile, d, LANES / queries, sums);
    for (; d < dim; d++) tile_values_rows(weights, queries, dim, tile, d, 1, sums);
}

/* Computes softcap * tanh(scores / softcap) from e^(-2 |x|), so that nothing overflows. */
static void cap(float *scores, float softcap) {
    for (int t = 0; t < TILE; t += LANES) {
        vf x = load(scores + t) * (1 / softcap), size = larger(x, -x), e = exponential(-2.f * size);
        vf tanh = (1.f - e) / (1.f + e);
        store(scores + t, softcap * choose(x < 0.f, -tanh, tanh));
    }
}

/* Converts one row's scores [TILE] to weights, 0 outside tokens [begin, end), and updates its running maximum, total and sums [dim]. */
static void online_softmax(float *scores, int64_t begin, int64_t end, float *maximum, float *total, float *sums, int64_t dim) {
    for (int64_t t = 0; t < begin; t++) scores[t] = -INFINITY;
    for (int64_t t = end; t < TILE; t++) scores[t] = -INFINITY;
    vf most = splat(*maximum), sum = splat(0);
    for (int t = 0; t < TILE; t += LANES) most = larger(load(scores + t), most);
    float now = largest_of(most);
    /* The maximum of a row without tokens so far is -inf: with a shift of 0, exp gives 0 instead of NaN. */
    float shift = now == -INFINITY ? 0 : now;
    for (int t = 0; t < TILE; t += LANES) {
        vf weight = exponential(load(scores + t) - shift);
        store(scores + t, weight);
        sum += weight;
    }
    float kept = expf(*maximum - shift);
    *total = *total * kept + sum_of(sum);
    if (now != *maximum)
        for (int64_t d = 0; d < dim; d++) sums[d] *= kept;
    *maximum = now;
}
