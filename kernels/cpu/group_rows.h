/* Unpacks group to rows of values, token by token, without a tile. */

/* Handles groups in the frame in which they are stored, if their columns, and scales along channels, fill whole vectors. */
static int has_group_rows(const Unpack *call) {
    const Codec *codec = call->side.codec;
    if (codec->family != GROUP || call->rotation.order || call->channel_scales.data || codec->token_scale || !is_plain(codec)) return 0;
    if (!is_fusable(&codec->packing[0]) || codec->packing[0].width % LANES) return 0;
    return codec->scales_stream >= 0 || codec->size % LANES == 0;
}

/* Computes the values of one token. Pairs of scale and center belong to channels if groups are groups of tokens. For groups of channels,
   they are [scale or center][TILE] for each group. */
INLINE void group_row(const Codec *codec, const char *low, const char *high, const float *scale, const float *center, int of_tokens,
                      char *row, int64_t dtype) {
    const Packing *packing = &codec->packing[0];
    int64_t width = packing->width, bits = packing->digit[0].bits;
    int size = __builtin_ctzll((uint64_t)codec->size);
    vf middle = splat(middle_of(codec));
    vi mask = splat_int((int32_t)(packing->digit[0].base - 1));
    for (int64_t c = 0; c < width; c += LANES) {
        vi code = load_columns(packing, low, high, c);
        for (int64_t d = c; d < codec->dim; d += width, code = (vi)((vu)code >> (uint32_t)bits)) {
            int64_t group = (d >> size) * 2 * TILE;
            vf x = (to_float(code & mask) - middle) * (of_tokens ? load(scale + d) : splat(scale[group]));
            x += of_tokens ? load(center + d) : splat(center[group]);
            if (dtype == F32)
                store((float *)row + d, x);
            else
                store_words((uint16_t *)row + d, dtype == BF16 ? to_bfloat(x) : to_half(x));
        }
    }
}

INLINE void group_rows(const Codec *codec, int64_t batch, int64_t head, const Loaded *in, float *spare, const Rows *rows, int64_t dtype) {
    const Packing *packing = &codec->packing[0];
    float *scale = spare, *center = spare + codec->dim;
    int64_t run = 0;
    for (int64_t p = 0; p < in->pieces; p++) {
        const Piece *piece = &in->piece[p];
        const Stream *s = piece->segment->streams;
        const char *low = s[0].data + batch * s[0].batch + head * s[0].head + piece->token * s[0].row, *high = low;
        if (packing->planes == 2) high = s[1].data + batch * s[1].batch + head * s[1].head + piece->token * s[1].row;
        for (int64_t t = piece->at; t < piece->at + piece->count; t++, low += s[0].row, high += s[packing->planes - 1].row) {
            char *row = rows->to + t * rows->stride;
            if (codec->scales_stream < 0) {
                group_row(codec, low, high, in->numbers + t, in->numbers + TILE + t, 0, row, dtype);
                continue;
            }
            if (run < in->runs && in->run[run].at == t) load_pairs(&in->run[run++], codec->dim, scale, center);
            group_row(codec, low, high, scale, center, 1, row, dtype);
        }
    }
}

static void write_group_rows(const Codec *codec, int64_t batch, int64_t head, const Loaded *in, float *spare, const Rows *rows) {
    switch (rows->dtype) {
        case F32: group_rows(codec, batch, head, in, spare, rows, F32); break;
        case BF16: group_rows(codec, batch, head, in, spare, rows, BF16); break;
        default: group_rows(codec, batch, head, in, spare, rows, F16);
    }
}
