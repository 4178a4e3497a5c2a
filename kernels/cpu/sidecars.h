/* Sidecars of the coded frame, after a codec's decoder (formats/sidecars.py). */

enum { CHUNK = 4, OUTLIER_BYTES = 10 };

/* outliers: writes chunks to their positions. */
static void put_outliers(const Loaded *in, float *tile) {
    for (int64_t t = 0; t < in->tokens; t++)
        for (int64_t i = 0; i < in->outliers[t].count; i++) {
            const char *chunk = in->outliers[t].chunks + i * OUTLIER_BYTES;
            float *to = tile + (int64_t)word_at(chunk + 2 * CHUNK) * CHUNK * TILE + t;
            for (int k = 0; k < CHUNK; k++) to[k * TILE] = half(word_at(chunk + 2 * k));
        }
}

/* qjl: adds the residuals, which are the signs rotated back, times one factor per token. `spare` has room for two tiles. */
static void add_sketch(const Codec *codec, const Loaded *in, float *spare, float *tile) {
    const Packing *packing = &codec->packing[codec->packings];
    const uint16_t *words = packing_words(codec, in, codec->packings);
    const float *norm = in->numbers + (codec->numbers - 1) * TILE;
    int32_t negative[TILE];
    for (int64_t d = 0; d < codec->dim; d++) {
        digits_of(packing, words, 0, d, negative);
        for (int t = 0; t < TILE; t += LANES) store(spare + d * TILE + t, to_float(1 - 2 * load_int(negative + t)));
    }
    rotate_back(&codec->sketch_rotation, codec->dim, spare, spare + codec->dim * TILE);
    for (int64_t d = 0; d < codec->dim; d++)
        for (int t = 0; t < TILE; t += LANES)
            store(tile + d * TILE + t, load(tile + d * TILE + t) + load(spare + d * TILE + t) * (load(norm + t) * codec->sketch_size));
}

/* key_mean: converts the vector of the page that contains a token to floats [dim]. Returns how many tokens of the page remain. */
AS_WRITTEN static int64_t page_vector(const Codec *codec, const Loaded *in, const Piece *piece, int64_t token, float *vector) {
    const Stream *codes = piece->segment->streams + codec->mean_stream;
    int64_t page = token / codec->mean_tokens, half_dim = codec->dim / 2;
    const uint8_t *row = (const uint8_t *)row_of(codes, in->batch, in->head, page);
    float scale = half(word_at(row_of(codes + 1, in->batch, in->head, page)));
    if (codec->mean_bits == 8)
        for (int64_t d = 0; d < codec->dim; d++) vector[d] = (float)(row[d] - 128) * scale;
    else
        for (int64_t d = 0; d < half_dim; d++) {
            vector[d] = (float)((row[d] & 15) - 8) * scale;
            vector[half_dim + d] = (float)((row[d] >> 4) - 8) * scale;
        }
    return codec->mean_tokens - token % codec->mean_tokens;
}

/* Calls the function with each `vector`, and with the tokens [at, at + count) of the tile to which it belongs. */
#define FOR_PAGES(codec, in, vector, call)                                                          \
    for (int64_t p = 0; p < (in)->pieces; p++)                                                      \
        for (int64_t t = 0, count; t < (in)->piece[p].count; t += count) {                          \
            const Piece *piece = &(in)->piece[p];                                                   \
            int64_t at = piece->at + t, left = piece->count - t;                                    \
            count = page_vector(codec, in, piece, piece->token + t, vector);                        \
            if (count > left) count = left;                                                         \
            call;                                                                                   \
        }

static void add_vector(const float *vector, int64_t dim, int64_t at, int64_t count, float *tile) {
    if (count == TILE) {
        for (int64_t d = 0; d < dim; d++)
            for (int t = 0; t < TILE; t += LANES) store(tile + d * TILE + t, load(tile + d * TILE + t) + vector[d]);
        return;
    }
    for (int64_t d = 0; d < dim; d++)
        for (int64_t t = at; t < at + count; t++) tile[d * TILE + t] += vector[d];
}

/* key_mean: adds each token's vector to its values. */
static void add_means(const Codec *codec, const Loaded *in, float *spare, float *tile) {
    FOR_PAGES(codec, in, spare, add_vector(spare, codec->dim, at, count, tile))
}

static float vector_product(const float *q, const float *vector, int64_t dim) {
    vf sums = {0};
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) sums += load(q + d) * load(vector + d);
    float sum = sum_of(sums);
    for (; d < dim; d++) sum += q[d] * vector[d];
    return sum;
}

static void add_products(const Codec *codec, const int32_t *raw, const float *q, int64_t rows, const float *vector, int64_t at, int64_t count, float *scores) {
    for (int64_t r = 0; r < rows; r++) {
        float sum = vector_product(q + r * codec->dim, vector, codec->dim), *to = scores + r * TILE;
        for (int64_t i = at; i < at + count; i++) to[i] += raw[i] ? 0 : sum;
    }
}

/* key_mean: adds the products of queries with each token's vector to scores, except those of raw tokens. */
AS_WRITTEN static void add_mean_scores(const Codec *codec, const Loaded *in, const float *q, int64_t rows, float *spare, float *scores) {
    int32_t raw[TILE] = {0};
    for (int64_t i = 0; i < in->patches; i++) raw[in->patch[i].at] = 1;
    FOR_PAGES(codec, in, spare, add_products(codec, raw, q, rows, spare, at, count, scores))
}

/* Applies all sidecars. If `with_means` is 0, the vectors of key_mean are left out. */
static void put_sidecars(const Codec *codec, const Loaded *in, int with_means, float *spare, float *tile) {
    if (codec->outlier_stream >= 0) put_outliers(in, tile);
    if (codec->sketches) add_sketch(codec, in, spare, tile);
    if (with_means && codec->mean_stream >= 0) add_means(codec, in, spare, tile);
    for (int64_t i = 0; i < in->patches; i++)
        for (int64_t d = 0; d < codec->dim; d++) memcpy(tile + d * TILE + in->patch[i].at, in->patch[i].values + 4 * d, 4);
}

/* Returns 1 if decoded values need no further steps, except for raw tokens. */
INLINE int is_plain(const Codec *codec) { return codec->outlier_stream < 0 && !codec->sketches && codec->mean_stream < 0; }
