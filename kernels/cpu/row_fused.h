/* Rows of values without a tile, for few queries: those of raw, and bf16 rows of lossless, whose parts are joined when they are multiplied.
   */

/* The dtype of lossless's rows: words of signs and fractions, and bytes of exponents. */
enum { IN_PARTS = U8 + 1 };

/* Consecutive tokens of one side, beginning with token `at` of the tile. */
typedef struct {
    int64_t at, count, stride, dim, dtype;
    const char *rows;
    const uint8_t *exponents;
} StoredRows;

/* StoredRows of whole vectors; channels d and d + dim / 2 of lossless are in the bytes of one word. */
static int has_rows(const Codec *codec) {
    if (!is_plain(codec) || codec->patch_stream >= 0 || codec->dim % LANES) return 0;
    const Packing *packing = &codec->packing[0];
    return codec->family == RAW || (codec->family == LOSSLESS && codec->fraction_bits == 7 && packing->planes == 1 && !packing->odd &&
                                    2 * packing->width == codec->dim && packing->width % LANES == 0);
}

/* Returns the rows of one piece, starting with its token `t`: all of them, or those whose exponents are in memory at the same time. */
static StoredRows rows_from(const Codec *codec, const Loaded *in, const Piece *piece, int64_t t) {
    const Stream *stream = piece->segment->streams;
    int64_t token = piece->token + t;
    StoredRows rows = {piece->at + t, piece->count - t, stream->row, codec->dim, codec->values[0].dtype, row_of(stream, in->batch, in->head, token), NULL};
    if (codec->family == LOSSLESS) {
        rows.dtype = IN_PARTS;
        int64_t group = MAX_CHUNKS * codec->group_tokens, left = group - token % group;
        load_chunks(codec, in, piece->segment, token / group);
        rows.exponents = in->chunk->exponents + token % group * codec->dim;
        if (left < rows.count) rows.count = left;
    }
    return rows;
}

/* Channels d to d + LANES of row t. */
INLINE vf of_row(const StoredRows *rows, int64_t dtype, int64_t t, int64_t d) {
    const char *row = rows->rows + t * rows->stride;
    if (dtype == F32) return (vf)load_int((const int32_t *)(row + 4 * d));
    if (dtype == F16) return load_half((const uint16_t *)(row + 2 * d));
    if (dtype == BF16) return (vf)(load_words((const uint16_t *)(row + 2 * d)) << 16);
    int64_t second = d >= rows->dim / 2;
    vi own = load_words((const uint16_t *)row + (second ? d - rows->dim / 2 : d)) >> (second ? 8 : 0);
    return (vf)((own & 0x80) << 24 | load_octets(rows->exponents + t * rows->dim + d) << 23 | (own & 0x7f) << 16);
}

/* Scores of `queries` queries with `count` tokens from row t on, whose LANES products are added up together. */
INLINE void row_scores(const StoredRows *rows, int64_t dtype, const float *q, int queries, int64_t t, int count, float *scores) {
    vf sum[LANES];
    float found[LANES];
    for (int i = 0; i < LANES; i++) sum[i] = splat(0);
    for (int64_t d = 0; d < rows->dim; d += LANES) {
        vf query[4];
        for (int r = 0; r < queries; r++) query[r] = load(q + r * rows->dim + d);
        for (int i = 0; i < count; i++) {
            vf x = of_row(rows, dtype, t + i, d);
            for (int r = 0; r < queries; r++) sum[r * count + i] += query[r] * x;
        }
    }
    store(found, sums_of(sum));
    for (int r = 0; r < queries; r++)
        for (int i = 0; i < count; i++) scores[r * TILE + rows->at + t + i] = found[r * count + i];
}

#define VECTORS_OF_ROW (LEVEL == 4 ? 4 : 2)

/* Adds weights [query][TILE] times `count` vectors from channel d on to sums [query][dim]. */
INLINE void row_values(const StoredRows *rows, int64_t dtype, const float *weights, int queries, int64_t d, int count, float *sums) {
    vf sum[4][4];
    for (int r = 0; r < queries; r++)
        for (int i = 0; i < count; i++) sum[r][i] = load(sums + r * rows->dim + d + i * LANES);
    for (int64_t t = 0; t < rows->count; t++)
        for (int i = 0; i < count; i++) {
            vf x = of_row(rows, dtype, t, d + i * LANES);
            for (int r = 0; r < queries; r++) sum[r][i] += weights[r * TILE + rows->at + t] * x;
        }
    for (int r = 0; r < queries; r++)
        for (int i = 0; i < count; i++) store(sums + r * rows->dim + d + i * LANES, sum[r][i]);
}

INLINE void scores_of_rows(const StoredRows *rows, int64_t dtype, const float *q, int queries, float *scores) {
    int64_t t = 0;
    for (; t + LANES / queries <= rows->count; t += LANES / queries) row_scores(rows, dtype, q, queries, t, LANES / queries, scores);
    for (; t < rows->count; t++) row_scores(rows, dtype, q, queries, t, 1, scores);
}

INLINE void values_of_rows(const StoredRows *rows, int64_t dtype, const float *weights, int queries, float *sums) {
    int64_t d = 0;
    for (; d + VECTORS_OF_ROW * LANES <= rows->dim; d += VECTORS_OF_ROW * LANES)
        row_values(rows, dtype, weights, queries, d, VECTORS_OF_ROW, sums);
    for (; d < rows->dim; d += LANES) row_values(rows, dtype, weights, queries, d, 1, sums);
}

/* Calls with `dtype` as a constant. */
#define BY_DTYPE(dtype, call)                   \
    if (dtype == F16) {                         \
        enum { DTYPE = F16 };                   \
        call;                                   \
    } else if (dtype == BF16) {                 \
        enum { DTYPE = BF16 };                  \
        call;                                   \
    } else if (dtype == F32) {                  \
        enum { DTYPE = F32 };                   \
        call;                                   \
    } else {                                    \
        enum { DTYPE = IN_PARTS };              \
        call;                                   \
    }
