/* One item of unpacking: tokens of one head, decoded tile by tile, rotated back and written row by row. */

#if LANES == 16
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif

/* To the nearest bfloat16 and binary16, ties to even, in the low bits; as torch does, NaN becomes a quiet one. */
INLINE vi to_bfloat(vf x) {
    vu bits = (vu)x, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = (vu)(x != x);
    return (vi)((rounded & ~nan) | (0x7fc0 & nan));
}

INLINE vi to_half(vf x) {
    vi bits = (vi)x, sign = (vi)((vu)bits >> 16) & 0x8000, size = bits & 0x7fffffff;
    vi normal = (vi)((vu)size + 0xfff + ((vu)size >> 13 & 1) - (112u << 23)) >> 13;
    /* Below 2^-14 an addition rounds to multiples of 2^-24. */
    vi small = (vi)((vf)size + .5f) - (vi)splat(.5f);
    vi is_small = size < 0x38800000, is_large = size >= 0x477ff000, is_nan = size > 0x7f800000;
    vi found = (small & is_small) | (normal & ~is_small);
    found = (found & ~is_large) | (0x7c00 & is_large);
    return sign | (found & ~is_nan) | (0x7e00 & is_nan);
}

/* Rows of floats, LANES channels of LANES tokens at a time. */
static void write_wide(const float *tile, int64_t dim, int64_t count, char *rows, int64_t stride) {
    int64_t whole = dim / LANES * LANES;
    for (int64_t d = 0; d < whole; d += LANES)
        for (int64_t t = 0; t < count; t += LANES) {
            vf a[LANES], b[LANES];
            for (int i = 0; i < LANES; i++) a[i] = load(tile + (d + i) * TILE + t);
            for (int n = 1; n < LANES; n *= 2) {
                for (int i = 0; i < LANES / 2; i++) {
                    b[2 * i] = SHUFFLE(vf, vi, a[i], a[i + LANES / 2], LOW);
                    b[2 * i + 1] = SHUFFLE(vf, vi, a[i], a[i + LANES / 2], HIGH);
                }
                for (int i = 0; i < LANES; i++) a[i] = b[i];
            }
            for (int i = 0; i < LANES && t + i < count; i++) store((float *)(rows + (t + i) * stride) + d, a[i]);
        }
    for (int64_t d = whole; d < dim; d++)
        for (int64_t t = 0; t < count; t++) memcpy(rows + t * stride + 4 * d, tile + d * TILE + t, 4);
}

/* Rows of 16-bit floats: they are narrowed first, because words are transposed faster. */
static void write_narrow(const float *tile, int64_t dim, int64_t count, uint16_t *spare, char *rows, int64_t stride, int to_bf16) {
    for (int64_t d = 0; d < dim; d++)
        for (int64_t t = 0; t < count; t += LANES) {
            vf x = load(tile + d * TILE + t);
            store_words(spare + d * TILE + t, to_bf16 ? to_bfloat(x) : to_half(x));
        }
    transpose_back(spare, count, dim, rows, stride);
}

/* `dim` rows of TILE floats to `count` rows of `dim`. `spare` holds as many words. */
static void write_rows(const float *tile, int64_t dim, int64_t count, uint16_t *spare, char *rows, int64_t stride, int64_t dtype) {
    switch (dtype) {
        case F32: write_wide(tile, dim, count, rows, stride); break;
        case BF16: write_narrow(tile, dim, count, spare, rows, stride, 1); break;
        default: write_narrow(tile, dim, count, spare, rows, stride, 0);
    }
}

static void scale_channels(const float *scales, int64_t dim, float *tile) {
    for (int64_t d = 0; d < dim; d++)
        for (int t = 0; t < TILE; t += LANES) store(tile + d * TILE + t, load(tile + d * TILE + t) * scales[d]);
}

/* Unpacks tokens [start, stop) of one head. */
static void unpack_item(const Unpack *call, int64_t batch, int64_t head, int64_t start, int64_t stop, Loaded *in, float *tile, float *spare) {
    const Codec *codec = call->side.codec;
    const char *scales = call->channel_scales.data;
    char *rows = (char *)call->out.data + batch * call->out.batch + head * call->out.head + (start - call->start) * call->out.row;
    int64_t segment = find_segment(&call->side, start);
    for (; start < stop; start += TILE, rows += TILE * call->out.row) {
        int64_t count = stop - start < TILE ? stop - start : TILE;
        find_pieces(&call->side, start, count, &segment, in);
        load_tile(codec, batch, head, 1, in);
        decode_tile(codec, in, spare, tile);
        rotate_back(&call->rotation, codec->dim, TILE, tile, spare);
        if (scales) scale_channels((const float *)(scales + batch * call->channel_scales.batch + head * call->channel_scales.head), codec->dim, tile);
        write_rows(tile, codec->dim, count, (uint16_t *)spare, rows, call->out.row, call->dtype);
    }
}
