/* Encoding of group where channels, columns and groups are whole vectors: values are read from where they are, twice, and their codes
   go to words at once. */

static int has_rows_to_encode(const Encode *call) {
    const Codec *codec = call->codec;
    return codec->dim % LANES == 0 && codec->packing[0].width % LANES == 0 && (codec->scales_stream >= 0 || codec->size % LANES == 0);
}

INLINE vf widened(const char *row, int64_t d, int64_t dtype) {
    if (dtype == F32) return load((const float *)row + d);
    vi x = load_words((const uint16_t *)row + d);
    return dtype == F16 ? from_half(x) : (vf)(x << 16);
}

/* Whether the codes of `count` groups are all in range. Codes grow with the values: those of the extremes are enough. */
static int are_in_range(const Encode *call, const float *low, const float *high, int64_t count, const float *factor, const float *offset) {
    float end = (float)call->codec->packing[0].digit[0].base - .5f;
    vi good = splat_int(-1);
    for (int64_t g = 0; g < count; g += LANES) {
        vf own = load(factor + g), more = load(offset + g);
        good &= (load(low + g) * own + more >= -.5f) & (load(high + g) * own + more < end);
    }
    return all_of(good);
}

/* The words of one token; factors and offsets are those of each channel, or of its group. */
INLINE void encode_row(const Encode *call, const char *x, const float *factor, const float *offset, int in_range, char *low, char *high,
                       int64_t dtype) {
    const Codec *codec = call->codec;
    const Packing *packing = &codec->packing[0];
    int64_t width = packing->width, bits = packing->digit[0].bits;
    int of_channels = codec->scales_stream >= 0, size = __builtin_ctzll((uint64_t)codec->size);
    float largest = (float)(packing->digit[0].base - 1);
    int32_t column[1024];
    for (int64_t c = 0; c < width; c += LANES) {
        vi all = splat_int(0);
        for (int64_t d = c, shift = 0; d < codec->dim; d += width, shift += bits) {
            vf own = of_channels ? load(factor + d) : splat(factor[d >> size]), more = of_channels ? load(offset + d) : splat(offset[d >> size]);
            vf value = widened(x, d, dtype);
            all |= (in_range ? nearest_int(value * own + more) : codes_of(value, own, more, largest)) << (int32_t)shift;
        }
        store_int(column + c, all);
    }
    store_columns(packing, column, low, high);
}

INLINE void encode_rows(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, const float *factor,
                        const float *offset, int64_t groups, int in_range, int64_t dtype) {
    const Packing *packing = &call->codec->packing[0];
    const Stream *lower = call->streams, *upper = call->streams + packing->planes - 1;
    for (int64_t t = start; t < start + count; t++, factor += groups, offset += groups) {
        const char *x = row_of(&call->x, batch, head, t);
        char *low = row_of(lower, batch, head, t), *high = row_of(upper, batch, head, t);
        if (in_range)
            encode_row(call, x, factor, offset, 1, low, high, dtype);
        else
            encode_row(call, x, factor, offset, 0, low, high, dtype);
    }
}

/* The extremes of `vectors` vectors of channels from `d` on, over `count` tokens; adds the values to `sum`. */
INLINE void token_extremes(const char *x, int64_t stride, int64_t count, int64_t d, int vectors, int64_t dtype, float *low, float *high, vf *sum) {
    vf least[4], most[4];
    for (int i = 0; i < vectors; i++) least[i] = most[i] = widened(x, d + i * LANES, dtype);
    for (int64_t t = 0; t < count; t++, x += stride)
        for (int i = 0; i < vectors; i++) {
            vf value = widened(x, d + i * LANES, dtype);
            least[i] = smaller(value, least[i]);
            most[i] = larger(value, most[i]);
            *sum += value;
        }
    for (int i = 0; i < vectors; i++) {
        store(low + d + i * LANES, least[i]);
        store(high + d + i * LANES, most[i]);
    }
}

/* Keys: `count` tokens share the scales of each channel. `spare` holds 4 * dim floats. */
INLINE int encode_token_rows(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, float *spare, int64_t dtype) {
    int64_t dim = call->codec->dim, d = 0;
    float *low = spare, *high = low + dim, *factor = high + dim, *offset = factor + dim;
    const char *x = row_of(&call->x, batch, head, start);
    char *pairs = row_of(&call->streams[call->codec->packing[0].planes], batch, head, start / call->codec->size);
    vf sum = splat(0);
    for (; d + 4 * LANES <= dim; d += 4 * LANES) token_extremes(x, call->x.row, count, d, 4, dtype, low, high, &sum);
    for (; d < dim; d += LANES) token_extremes(x, call->x.row, count, d, 1, dtype, low, high, &sum);
    if (!is_finite(sum) || !make_scales(call, low, high, dim, factor, offset, (int32_t *)pairs)) return 0;
    encode_rows(call, batch, head, start, count, factor, offset, 0, are_in_range(call, low, high, dim, factor, offset), dtype);
    return 1;
}

/* Values: every group of channels of a token has a scale. `spare` holds 5 * TOKENS_OF_GROUPS * (dim / LANES + 1) numbers. */
INLINE int encode_channel_rows(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, float *spare, int64_t dtype) {
    const Codec *codec = call->codec;
    int64_t size = codec->size < codec->dim ? codec->size : codec->dim, groups = (codec->dim + size - 1) / size, all = count * groups;
    int64_t room = (all + LANES - 1) / LANES * LANES;
    float *low = spare, *high = low + room, *factor = high + room, *offset = factor + room;
    int32_t *pairs = (int32_t *)(offset + room);
    vf sum = splat(0);
    for (int64_t n = 0; n < all; n += LANES) {
        vf least[LANES], most[LANES];
        for (int64_t i = 0, t = n / groups, g = n % groups; i < LANES; i++) {
            const char *x = row_of(&call->x, batch, head, start + t);
            int64_t first = g * size, end = first + size < codec->dim ? first + size : codec->dim;
            least[i] = most[i] = widened(x, first, dtype);
            sum += least[i];
            for (int64_t d = first + LANES; d < end; d += LANES) {
                vf value = widened(x, d, dtype);
                least[i] = smaller(value, least[i]);
                most[i] = larger(value, most[i]);
                sum += value;
            }
            /* The last group again, where there are no more. */
            if (n + i + 1 < all && ++g == groups) g = 0, t++;
        }
        store(low + n, minima_of(least));
        store(high + n, maxima_of(most));
    }
    if (!is_finite(sum) || !make_scales(call, low, high, all, factor, offset, pairs)) return 0;
    for (int64_t t = 0; t < count; t++)
        memcpy(row_of(&call->streams[codec->packing[0].planes], batch, head, start + t), pairs + t * groups, 4 * groups);
    encode_rows(call, batch, head, start, count, factor, offset, groups, are_in_range(call, low, high, all, factor, offset), dtype);
    return 1;
}

INLINE int encode_groups_of(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t stop, float *spare, int64_t dtype) {
    int64_t step = call->codec->scales_stream < 0 ? TOKENS_OF_GROUPS : call->codec->size;
    for (; start < stop; start += step) {
        int64_t count = stop - start < step ? stop - start : step;
        int done = call->codec->scales_stream < 0 ? encode_channel_rows(call, batch, head, start, count, spare, dtype)
                                                  : encode_token_rows(call, batch, head, start, count, spare, dtype);
        if (!done) return 0;
    }
    return 1;
}

/* Tokens [start, stop) of one head, from the first of a token group on; false where formats/ is to refuse a value. */
static int encode_groups(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t stop, float *spare) {
    if (has_rows_to_encode(call)) switch (call->dtype) {
            case F32: return encode_groups_of(call, batch, head, start, stop, spare, F32);
            case BF16: return encode_groups_of(call, batch, head, start, stop, spare, BF16);
            default: return encode_groups_of(call, batch, head, start, stop, spare, F16);
        }
    int64_t step = call->codec->scales_stream < 0 ? TOKENS_OF_GROUPS : call->codec->size;
    for (; start < stop; start += step) {
        int64_t count = stop - start < step ? stop - start : step;
        int done = call->codec->scales_stream < 0 ? encode_channel_groups(call, batch, head, start, count, spare)
                                                  : encode_token_group(call, batch, head, start, count, spare);
        if (!done) return 0;
    }
    return 1;
}
