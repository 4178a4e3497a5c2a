/* group without a tile, for few queries: codes are multiplied as soon as they are extracted, and scales are applied to queries or weights.

A key is scale * (code - middle) + center in each channel. q * scale is computed once per run, and the sum of q * (center - middle * scale)
is an offset of every score. A code then takes only one conversion and one multiply-add per query. */

/* Returns whether keys are in groups of tokens, each of whole vectors in this tile. */
static int has_fused_scores(const Codec *codec, const Loaded *in) {
    if (codec->family != GROUP || codec->scales_stream < 0 || !is_fusable(&codec->packing[0]) || in->patches || !is_plain(codec)) return 0;
    for (int64_t r = 0; r < in->runs; r++)
        if (in->run[r].at % LANES) return 0;
    return 1;
}

/* Returns whether values are in groups of channels, each of whole vectors of columns. */
static int has_fused_values(const Codec *codec) {
    if (codec->family != GROUP || codec->scales_stream >= 0 || !is_fusable(&codec->packing[0]) || !is_plain(codec)) return 0;
    int64_t width = codec->packing[0].width;
    return width % LANES == 0 && codec->size % LANES == 0 && codec->dim % codec->size == 0 && (width % codec->size == 0 || codec->size % width == 0);
}

/* Computes the scores of `queries` queries with tokens [at, at + BLOCKS * LANES). q [query][channel] has been multiplied by the scales. */
INLINE void fused_scores(const Packing *packing, const uint16_t *words, const float *q, int queries, int blocks, const float *offset,
                         float *scores) {
    int64_t width = packing->width, fields = packing->symbols / width, bits = packing->digit[0].bits;
    vf sum[4][4];
    for (int r = 0; r < queries; r++)
        for (int b = 0; b < blocks; b++) sum[r][b] = splat(offset[r]);
    vi mask = splat_int((int32_t)(packing->digit[0].base - 1));
    for (int64_t c = 0; c < width; c++) {
        vi code[4];
        for (int b = 0; b < blocks; b++) {
            code[b] = load_words(words + c * TILE + b * LANES);
            if (packing->planes == 2) code[b] |= load_words(words + (width + c) * TILE + b * LANES) << 16;
        }
        for (int64_t k = 0; k < fields; k++) {
            const float *row = q + k * width + c;
            for (int b = 0; b < blocks; b++) {
                vf x = to_float(code[b] & mask);
                code[b] = (vi)((vu)code[b] >> (uint32_t)bits);
                for (int r = 0; r < queries; r++) sum[r][b] += row[r * packing->symbols] * x;
            }
        }
    }
    for (int r = 0; r < queries; r++)
        for (int b = 0; b < blocks; b++) store(scores + r * TILE + b * LANES, sum[r][b]);
}

/* Computes scores [query][TILE] of all tokens. q is [query][dim], and `spare` has room for (2 + queries) * dim floats. */
INLINE void group_scores(const Codec *codec, const Loaded *in, const float *q, int queries, float *spare, float *scores) {
    int64_t dim = codec->dim;
    float middle = middle_of(codec), *scale = spare, *center = spare + dim, *scaled = spare + 2 * dim, offset[4];
    for (int64_t i = 0; i < in->runs; i++) {
        const Run *run = &in->run[i];
        load_pairs(run, dim, scale, center);
        for (int r = 0; r < queries; r++) {
            vf sum = splat(0);
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) {
                vf x = load(q + r * dim + d), own = load(scale + d);
                store(scaled + r * dim + d, x * own);
                sum += x * (load(center + d) - middle * own);
            }
            offset[r] = sum_of(sum);
            for (; d < dim; d++) {
                scaled[r * dim + d] = q[r * dim + d] * scale[d];
                offset[r] += q[r * dim + d] * (center[d] - middle * scale[d]);
            }
        }
        int64_t t = run->at, end = run->at + run->count;
        for (; t + 2 * LANES <= end; t += 2 * LANES) fused_scores(&codec->packing[0], in->words + t, scaled, queries, 2, offset, scores + t);
        for (; t < end; t += LANES) fused_scores(&codec->packing[0], in->words + t, scaled, queries, 1, offset, scores + t);
    }
    if (!codec->token_scale) return;
    for (int r = 0; r < queries; r++)
        for (int t = 0; t < TILE; t += LANES) store(scores + r * TILE + t, load(scores + r * TILE + t) * load(in->numbers + t));
}

#define FIELDS_AT_ONCE (LEVEL == 4 ? 4 : 2)

/* Adds codes times weights [group][query][TILE] of one piece to sums [query][dim], for FIELDS_AT_ONCE fields from `field` on. */
INLINE void fused_values(const Codec *codec, const Piece *piece, const Stream *streams, const char *low, const char *high,
                         const float *weights, int queries, int64_t column, int64_t field, int count, float *sums) {
    const Packing *packing = &codec->packing[0];
    int64_t bits = packing->digit[0].bits;
    vf sum[4][4];
    const float *weight[4];
    for (int f = 0; f < count; f++) {
        int64_t channel = (field + f) * packing->width + column;
        weight[f] = weights + channel / codec->size * queries * TILE;
        for (int r = 0; r < queries; r++) sum[f][r] = load(sums + r * codec->dim + channel);
    }
    vi mask = splat_int((int32_t)(packing->digit[0].base - 1));
    for (int64_t t = piece->at; t < piece->at + piece->count; t++) {
        vi code = (vi)((vu)load_columns(packing, low, high, column) >> (uint32_t)(field * bits));
        low += streams[0].row;
        if (packing->planes == 2) high += streams[1].row;
        for (int f = 0; f < count; f++) {
            vf x = to_float(code & mask);
            code = (vi)((vu)code >> (uint32_t)bits);
            for (int r = 0; r < queries; r++) sum[f][r] += weight[f][r * TILE + t] * x;
        }
    }
    for (int f = 0; f < count; f++)
        for (int r = 0; r < queries; r++) store(sums + r * codec->dim + (field + f) * packing->width + column, sum[f][r]);
}

/* Adds weights [query][TILE] times values to sums [query][dim]. The weights of tokens that no query sees are 0. */
INLINE void group_values(const Codec *codec, const Loaded *in, int64_t batch, int64_t head, const float *weights, int queries, float *spare,
                         float *sums) {
    const Packing *packing = &codec->packing[0];
    int64_t groups = codec->dim / codec->size, fields = packing->symbols / packing->width;
    float middle = middle_of(codec);
    const float *factor = codec->token_scale ? in->numbers + 2 * groups * TILE : 0;
    for (int64_t g = 0; g < groups; g++)
        for (int r = 0; r < queries; r++) {
            vf center = splat(0);
            for (int t = 0; t < TILE; t += LANES) {
                vf p = load(weights + r * TILE + t), scale = load(in->numbers + 2 * g * TILE + t);
                if (factor) p *= load(factor + t);
                store(spare + (g * queries + r) * TILE + t, p * scale);
                center += p * (load(in->numbers + (2 * g + 1) * TILE + t) - middle * scale);
            }
            float whole = sum_of(center);
            for (int64_t d = g * codec->size; d < (g + 1) * codec->size; d += LANES)
                store(sums + r * codec->dim + d, load(sums + r * codec->dim + d) + whole);
        }
    for (int64_t p = 0; p < in->pieces; p++) {
        const Piece *piece = &in->piece[p];
        const Stream *s = piece->segment->streams;
        const char *low = s[0].data + batch * s[0].batch + head * s[0].head + piece->token * s[0].row, *high = 0;
        if (packing->planes == 2) high = s[1].data + batch * s[1].batch + head * s[1].head + piece->token * s[1].row;
        for (int64_t column = 0; column < packing->width; column += LANES) {
            int64_t field = 0;
            for (; field + FIELDS_AT_ONCE <= fields; field += FIELDS_AT_ONCE)
                fused_values(codec, piece, s, low, high, spare, queries, column, field, FIELDS_AT_ONCE, sums);
            for (; field < fields; field++) fused_values(codec, piece, s, low, high, spare, queries, column, field, 1, sums);
        }
    }
}
