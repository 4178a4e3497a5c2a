/* angle without a tile, for values that few queries weight: a vector has LANES pairs of one token, whose norms of few levels are one table. */

/* A quarter turn of 2^FUSED_QUARTER bins has one table of MIN_ENTRIES. */
enum { FUSED_QUARTER = 4 };

/* Returns whether values have few bins and levels of norms, and whole vectors of columns. */
static int has_fused_pairs(const Codec *codec) {
    if (codec->family != ANGLE || codec->packings != 2 || codec->quarter_bits != FUSED_QUARTER || !is_plain(codec)) return 0;
    if (codec->norm_kind == NORM_STORED || codec->norm_levels > MIN_ENTRIES) return 0;
    for (const Packing *packing = codec->packing; packing < codec->packing + 2; packing++)
        if (!packing->binary || !is_fusable(packing) || packing->width % LANES || 2 * packing->symbols != codec->dim) return 0;
    return 1;
}

/* The norms of every level: norms [TILE][MIN_ENTRIES]. */
static void level_norms(const Codec *codec, const Loaded *in, float *norms) {
    static const float levels[MIN_ENTRIES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t t = 0; t < in->tokens; t++)
        for (int l = 0; l < MIN_ENTRIES; l += LANES) {
            vf norm = in->numbers[TILE + t] + in->numbers[t] * load(levels + l);
            store(norms + MIN_ENTRIES * t + l, codec->norm_kind == NORM_LOG ? power_of_two(norm) : norm);
        }
}

/* Symbols of one packing: the row of its first plane and of its second one, which move from token to token, and which bits of columns. */
typedef struct {
    const Packing *packing;
    const char *low, *high;
    int64_t low_stride, high_stride, column;
    int32_t shift, mask;
} Symbols;

INLINE Symbols symbols_from(const Packing *packing, const Stream *streams, const Loaded *in, int64_t token, int64_t symbol) {
    const Stream *high = streams + packing->planes - 1;
    return (Symbols){packing, row_of(streams, in->batch, in->head, token), row_of(high, in->batch, in->head, token), streams->row, high->row,
                     symbol % packing->width, (int32_t)(symbol / packing->width * packing->digit[0].bits), (int32_t)(packing->digit[0].base - 1)};
}

INLINE vi next_symbols(Symbols *from) {
    vi columns = load_columns(from->packing, from->low, from->high, from->column);
    from->low += from->low_stride;
    from->high += from->high_stride;
    return (vi)((vu)columns >> (uint32_t)from->shift) & from->mask;
}

/* Adds weights [4][TILE] times pairs [symbol, symbol + LANES) of one piece to sums [4][dim]. */
INLINE void pair_values(const Codec *codec, const Loaded *in, const Piece *piece, const float *norms, const float *weights, int64_t symbol, float *sums) {
    const Stream *streams = piece->segment->streams;
    Symbols bins = symbols_from(&codec->packing[0], streams, in, piece->token, symbol);
    Symbols codes = symbols_from(&codec->packing[1], streams + codec->packing[0].planes, in, piece->token, symbol);
    Directions directions = {codec->table[0].data, codec->table[1].data, MIN_ENTRIES, FUSED_QUARTER};
    vf sum[4][2];
    UNROLLED for (int r = 0; r < 4; r++) sum[r][0] = sum[r][1] = splat(0);
    for (int64_t t = piece->at; t < piece->at + piece->count; t++) {
        vf cosine, sine;
        directions_of(&directions, next_symbols(&bins), &cosine, &sine);
        vf norm = lookup(norms + MIN_ENTRIES * t, MIN_ENTRIES, next_symbols(&codes));
        cosine *= norm, sine *= norm;
        UNROLLED for (int r = 0; r < 4; r++) {
            sum[r][0] += weights[r * TILE + t] * cosine;
            sum[r][1] += weights[r * TILE + t] * sine;
        }
    }
    UNROLLED for (int r = 0; r < 4; r++) {
        float *to = sums + r * codec->dim + 2 * symbol;
        store(to, load(to) + SHUFFLE(vf, vi, sum[r][0], sum[r][1], LOW));
        store(to + LANES, load(to + LANES) + SHUFFLE(vf, vi, sum[r][0], sum[r][1], HIGH));
    }
}

/* Adds weights [4][TILE] times all values to sums [4][dim]; `norms` is room for those of a tile. */
static void angle_values(const Codec *codec, const Loaded *in, const float *weights, float *norms, float *sums) {
    level_norms(codec, in, norms);
    for (int64_t p = 0; p < in->pieces; p++)
        for (int64_t symbol = 0; 2 * symbol < codec->dim; symbol += LANES) pair_values(codec, in, &in->piece[p], norms, weights, symbol, sums);
}
