/* One item of attention: some query rows of one KV head over some tokens of one span, tile by tile.

Rows are the queries of all query heads that share the KV head. A decoded tile is [channel][TILE], tokens along memory: a vector holds one
channel of LANES tokens, and is multiplied by one channel of every query, so that a tile is read once for up to four rows. */

/* The memory of one thread. */
typedef struct {
    Loaded k, v;
    float *queries; /* [ROW_SPACE][k dim] */
    float *scores;  /* [ROW_SPACE][TILE] */
    float *tile;    /* [larger dim][TILE] */
    float *spare;
} Scratch;

/* Calls with QUERIES 4, 2 and 1 as constants, so that the sums of a block stay in registers. The last block of three rows takes four:
   buffers have zeros, or room, for three rows more. */
#define IN_BLOCKS(rows, call)                    \
    for (int64_t row = 0; row < (rows);) {       \
        int64_t left = (rows) - row;             \
        if (left > 2) {                          \
            enum { QUERIES = 4 };                \
            call;                                \
            row += 4;                            \
        } else if (left == 2) {                  \
            enum { QUERIES = 2 };                \
            call;                                \
            row += 2;                            \
        } else {                                 \
            enum { QUERIES = 1 };                \
            call;                                \
            row += 1;                            \
        }                                        \
    }

AS_WRITTEN static __attribute__((noinline)) void all_group_scores(const Codec *codec, const Loaded *in, const float *q, int64_t rows, float *spare, float *scores) {
    IN_BLOCKS(rows, group_scores(codec, in, q + row * codec->dim, QUERIES, spare, scores + row * TILE))
}

static __attribute__((noinline)) void all_tile_scores(const float *q, int64_t rows, int64_t dim, const float *tile, float *scores) {
    IN_BLOCKS(rows, tile_scores(q + row * dim, QUERIES, dim, tile, scores + row * TILE))
}

static __attribute__((noinline)) void all_group_values(const Codec *codec, const Loaded *in, const Item *item, const float *weights, float *spare, float *sums) {
    IN_BLOCKS(item->rows, group_values(codec, in, item->batch, item->head, weights + row * TILE, QUERIES, spare, sums + row * codec->dim))
}

static __attribute__((noinline)) void all_tile_values(const float *weights, int64_t rows, int64_t dim, const float *tile, float *sums) {
    IN_BLOCKS(rows, tile_values(weights + row * TILE, QUERIES, dim, tile, sums + row * dim))
}

static __attribute__((noinline)) void all_row_scores(const Codec *codec, const Loaded *in, const float *q, int64_t count, float *scores) {
    for (int64_t p = 0; p < in->pieces; p++)
        for (int64_t t = 0; t < in->piece[p].count;) {
            StoredRows rows = rows_from(codec, in, &in->piece[p], t);
            BY_DTYPE(rows.dtype, IN_BLOCKS(count, scores_of_rows(&rows, DTYPE, q + row * codec->dim, QUERIES, scores + row * TILE)))
            t += rows.count;
        }
}

static __attribute__((noinline)) void all_row_values(const Codec *codec, const Loaded *in, int64_t hidden, const float *weights, int64_t count, float *sums) {
    for (int64_t p = 0; p < in->pieces; p++)
        for (int64_t t = hidden > in->piece[p].at ? hidden - in->piece[p].at : 0; t < in->piece[p].count;) {
            StoredRows rows = rows_from(codec, in, &in->piece[p], t);
            BY_DTYPE(rows.dtype, IN_BLOCKS(count, values_of_rows(&rows, DTYPE, weights + row * TILE, QUERIES, sums + row * codec->dim)))
            t += rows.count;
        }
}

/* Maximum number of query rows for which codes are multiplied as soon as they are read. With more rows, it is faster to decode each tile
   once for all of them. */
enum { MAX_FUSED_ROWS = 4 };

static void key_scores(const Item *item, Scratch *scratch) {
    const Codec *codec = item->span->k.codec;
    Loaded *in = &scratch->k;
    if (item->rows <= MAX_FUSED_ROWS && has_rows(codec)) {
        all_row_scores(codec, in, scratch->queries, item->rows, scratch->scores);
        return;
    }
    load_tile(codec, 1, in);
    if (item->rows <= MAX_FUSED_ROWS && has_fused_scores(codec, in)) {
        all_group_scores(codec, in, scratch->queries, item->rows, scratch->spare, scratch->scores);
        return;
    }
    decode_tile(codec, in, 0, scratch->spare, scratch->tile);
    all_tile_scores(scratch->queries, item->rows, codec->dim, scratch->tile, scratch->scores);
    if (codec->mean_stream >= 0) add_mean_scores(codec, in, scratch->queries, item->rows, scratch->spare, scratch->scores);
}

/* Adds the weighted values of a tile. No row sees the first `hidden` tokens. Their raw values may be NaN or infinite, and 0 times such a
   value is NaN, so they are skipped. */
static void add_values(const Item *item, Scratch *scratch, int64_t hidden, float *sums) {
    const Codec *codec = item->span->v.codec;
    Loaded *in = &scratch->v;
    if (item->rows <= MAX_FUSED_ROWS && has_rows(codec)) {
        all_row_values(codec, in, hidden, scratch->scores, item->rows, sums);
        return;
    }
    int pairs = has_fused_pairs(codec);
    if (item->rows <= MAX_FUSED_ROWS && (pairs || has_fused_values(codec))) {
        load_tile(codec, 0, in);
        if (!in->patches) {
            if (pairs)
                angle_values(codec, in, scratch->scores, scratch->spare, sums);
            else
                all_group_values(codec, in, item, scratch->scores, scratch->spare, sums);
            return;
        }
    }
    load_tile(codec, 1, in);
    decode_tile(codec, in, 1, scratch->spare, scratch->tile);
    for (int64_t d = 0; hidden && d < codec->dim; d++) memset(scratch->tile + d * TILE, 0, sizeof(float) * hidden);
    all_tile_values(scratch->scores, item->rows, codec->dim, scratch->tile, sums);
}

/* The first token to read: the first visible one, or the first of its token group. */
static int64_t aligned_start(const Item *item, int64_t seen) {
    int64_t k = item->span->k.codec->group_tokens, v = item->span->v.codec->group_tokens, group = k > v ? k : v;
    return seen - (seen - item->start) % group;
}

/* Computes attention for one item. `largest` and `total` [ROW_SPACE] and `sums` [ROW_SPACE][v dim] receive its part of the softmax. */
static void attend_item(const Attend *call, const Item *item, Scratch *scratch, float *largest, float *total, float *sums) {
    const Side *k = &item->span->k, *v = &item->span->v;
    int64_t k_dim = k->codec->dim, begin = item->stop, end = item->start;
    int64_t row_begin[MAX_ROWS], row_end[MAX_ROWS];
    for (int64_t r = 0; r < item->rows; r++) {
        const int64_t *visible = call->visible + 2 * (item->batch * call->q_len + (item->first + r) % call->q_len);
        row_begin[r] = visible[0];
        row_end[r] = visible[1];
        if (visible[0] < begin) begin = visible[0];
        if (visible[1] > end) end = visible[1];
        largest[r] = -INFINITY;
        total[r] = 0;
    }
    memset(sums, 0, sizeof(float) * (item->rows + 3) * v->codec->dim);
    if (begin < item->start) begin = item->start;
    if (end > item->stop) end = item->stop;
    if (begin >= end) return;
    const float *queries = item->span->queries + ((item->batch * call->heads + item->head) * call->rows + item->first) * k_dim;
    memcpy(scratch->queries, queries, sizeof(float) * item->rows * k_dim);
    /* The last block of four may contain an unused row. */
    memset(scratch->queries + item->rows * k_dim, 0, sizeof(float) * 3 * k_dim);
    scratch->k.batch = scratch->v.batch = item->batch;
    scratch->k.head = scratch->v.head = item->head;
    int64_t start = aligned_start(item, begin), k_segment = find_segment(k, start), v_segment = find_segment(v, start);
    for (; start < end; start += TILE) {
        int64_t count = end - start < TILE ? end - start : TILE;
        find_pieces(k, start, count, &k_segment, &scratch->k);
        prefetch_segments(k, item->batch, item->head, start + TILE, k_segment);
        key_scores(item, scratch);
        for (int64_t r = 0; r < item->rows; r++) {
            int64_t first = row_begin[r] - start, last = row_end[r] - start;
            first = first < 0 ? 0 : first > count ? count : first;
            last = last > count ? count : last < first ? first : last;
            if (call->softcap > 0) cap(scratch->scores + r * TILE, (float)call->softcap);
            online_softmax(scratch->scores + r * TILE, first, last, &largest[r], &total[r], sums + r * v->codec->dim, v->codec->dim);
        }
        memset(scratch->scores + item->rows * TILE, 0, sizeof(float) * 3 * TILE);
        find_pieces(v, start, count, &v_segment, &scratch->v);
        prefetch_segments(v, item->batch, item->head, start + TILE, v_segment);
        add_values(item, scratch, start + count < begin ? count : start < begin ? begin - start : 0, sums);
    }
}
