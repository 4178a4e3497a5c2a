/* Encoding of group where channels, columns and groups are whole vectors: values are read from where they are, twice, and their codes
   go to words at once. */

enum { CACHE_LINE = 64 };

static int has_rows_to_encode(const Encode *call) {
    const Codec *codec = call->codec;
    return codec->dim % LANES == 0 && codec->packing[0].width % LANES == 0 && (codec->scales_stream >= 0 || codec->size % LANES == 0);
}

INLINE vf widened(const char *row, int64_t d, int64_t dtype) {
    if (dtype == F32) return load((const float *)row + d);
    if (dtype == F16) return load_half((const uint16_t *)row + d);
    return (vf)(load_words((const uint16_t *)row + d) << 16);
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
    int64_t width = packing->width, dim = codec->dim;
    int of_channels = codec->scales_stream >= 0, size = __builtin_ctzll((uint64_t)codec->size), one_plane = packing->planes == 1 && !packing->odd;
    float largest = (float)(packing->digit[0].base - 1);
    vi bits = splat_int((int32_t)packing->digit[0].bits);
    int32_t column[1024 + 2 * LANES];
    for (int64_t c = 0; c < width; c += LANES) {
        /* From the last field down, so that every shift is of all codes that are there. */
        vi all = splat_int(0);
        for (int64_t d = dim - width + c; d >= 0; d -= width) {
            vf own = of_channels ? load(factor + d) : splat(factor[d >> size]), more = of_channels ? load(offset + d) : splat(offset[d >> size]);
            vf value = widened(x, d, dtype);
            all = (all << bits) | (in_range ? nearest_int(value * own + more) : codes_of(value, own, more, largest));
        }
        if (one_plane)
            store_words((uint16_t *)low + c, all);
        else
            store_int(column + c, all);
    }
    if (one_plane) return;
    store_int(column + width, splat_int(0));
    store_columns(packing, column, low, high);
}

/* The rows after those that are encoded are on their way from memory meanwhile. */
INLINE void encode_rows(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, const float *factor,
                        const float *offset, int64_t groups, int in_range, int64_t dtype) {
    const Packing *packing = &call->codec->packing[0];
    const Stream *lower = call->streams, *upper = call->streams + packing->planes - 1;
    int64_t bytes = call->codec->dim * (dtype == F32 ? 4 : 2);
    for (int64_t t = start; t < start + count; t++, factor += groups, offset += groups) {
        const char *x = row_of(&call->x, batch, head, t);
        char *low = row_of(lower, batch, head, t), *high = row_of(upper, batch, head, t);
        if (t + count < call->tokens)
            for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(x + count * call->x.row + i);
        if (in_range)
            encode_row(call, x, factor, offset, 1, low, high, dtype);
        else
            encode_row(call, x, factor, offset, 0, low, high, dtype);
    }
}

/* Words whose order is that of the numbers that they hold, in bf16 or binary16; and back. */
INLINE vw ordered(vw x) { return x ^ ((x >> 15) & 0x7fff); }

INLINE vw ordered_words(const char *row, int64_t d) { return ordered(*(const vw_any *)(row + 2 * d)); }

/* Whether all numbers are finite, of which these are extremes. */
INLINE int extremes_are_finite(const float *low, const float *high, int64_t count) {
    vf none = splat(0);
    for (int64_t n = 0; n < count; n += LANES) none += (load(low + n) + load(high + n)) * 0.f;
    return is_finite(none);
}

/* The extremes of LANES channels from `d` on, over `count` tokens; false where one is infinite or NaN. */
INLINE int token_extremes(const char *x, int64_t stride, int64_t count, int64_t d, int64_t dtype, float *low, float *high) {
    vf least = widened(x, d, dtype), most = least, sum = splat(0);
    for (int64_t t = 0; t < count; t++, x += stride) {
        vf value = widened(x, d, dtype);
        least = smaller(value, least);
        most = larger(value, most);
        sum += value * 0.f;
    }
    store(low + d, least);
    store(high + d, most);
    return is_finite(sum);
}

/* The same of `vectors` vectors of words, which are compared before they are widened; numbers that are none are extremes, too. */
INLINE void token_word_extremes(const char *x, int64_t stride, int64_t count, int64_t d, int vectors, int64_t dtype, float *low, float *high) {
    vw least[4], most[4];
    for (int i = 0; i < vectors; i++) least[i] = most[i] = ordered_words(x, d + 2 * i * LANES);
    for (int64_t t = 1; t < count; t++)
        for (int i = 0; i < vectors; i++) {
            vw value = ordered_words(x + t * stride, d + 2 * i * LANES);
            least[i] = smaller_word(value, least[i]);
            most[i] = larger_word(value, most[i]);
        }
    for (int i = 0; i < vectors; i++) {
        vw words[2] = {ordered(least[i]), ordered(most[i])};
        for (int half = 0; half < 2; half++) {
            store(low + d + (2 * i + half) * LANES, widened((const char *)&words[0], half * LANES, dtype));
            store(high + d + (2 * i + half) * LANES, widened((const char *)&words[1], half * LANES, dtype));
        }
    }
}

/* Keys: `count` tokens share the scales of each channel. `spare` holds 4 * dim floats. */
INLINE int encode_token_rows(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, float *spare, int64_t dtype) {
    int64_t dim = call->codec->dim, stride = call->x.row, d = 0;
    float *low = spare, *high = low + dim, *factor = high + dim, *offset = factor + dim;
    const char *x = row_of(&call->x, batch, head, start);
    char *pairs = row_of(&call->streams[call->codec->packing[0].planes], batch, head, start / call->codec->size);
    if (dtype != F32) {
        for (; d + 8 * LANES <= dim; d += 8 * LANES) token_word_extremes(x, stride, count, d, 4, dtype, low, high);
        for (; d + 2 * LANES <= dim; d += 2 * LANES) token_word_extremes(x, stride, count, d, 1, dtype, low, high);
        if (!extremes_are_finite(low, high, d)) return 0;
    }
    for (; d < dim; d += LANES)
        if (!token_extremes(x, stride, count, d, dtype, low, high)) return 0;
    if (!make_scales(call, low, high, dim, factor, offset, (int32_t *)pairs)) return 0;
    encode_rows(call, batch, head, start, count, factor, offset, 0, are_in_range(call, low, high, dim, factor, offset), dtype);
    return 1;
}

/* low and high of LANES groups of `size` channels from token `t`, channel `first` on, of `all`; after the last, of it again. */
INLINE int channel_extremes(const Encode *call, int64_t batch, int64_t head, int64_t t, int64_t first, int64_t size, int64_t all, int64_t dtype,
                            float *low, float *high) {
    int64_t dim = call->codec->dim;
    const char *x = row_of(&call->x, batch, head, t);
    vf least[LANES], most[LANES], sum = splat(0);
    for (int64_t i = 0; i < LANES; i++) {
        int64_t end = first + size < dim ? first + size : dim;
        least[i] = most[i] = widened(x, first, dtype);
        sum += least[i] * 0.f;
        for (int64_t d = first + LANES; d < end; d += LANES) {
            vf value = widened(x, d, dtype);
            least[i] = smaller(value, least[i]);
            most[i] = larger(value, most[i]);
            sum += value * 0.f;
        }
        if (i + 1 < all && (first += size) >= dim) first = 0, x += call->x.row;
    }
    store(low, minima_of(least));
    store(high, maxima_of(most));
    return is_finite(sum);
}

/* The same of whole vectors of words, of infinities and NaN, too: maxima are minima of what is left when all bits are turned, so that both are found in one go. */
INLINE void channel_word_extremes(const Encode *call, int64_t batch, int64_t head, int64_t t, int64_t first, int64_t size, int64_t all,
                                 int64_t dtype, float *low, float *high) {
    int64_t dim = call->codec->dim;
    const char *x = row_of(&call->x, batch, head, t);
    vi both[LANES];
    for (int64_t i = 0; i < LANES; i++) {
        vw least = ordered_words(x, first), most = least;
        for (int64_t d = first + 2 * LANES; d < first + size; d += 2 * LANES) {
            vw value = ordered_words(x, d);
            least = smaller_word(value, least);
            most = larger_word(value, most);
        }
        vu turned = ~(vu)most;
        vw even = (vw)(((vu)least & 0xffff) | turned << 16), odd = (vw)((vu)least >> 16 | (turned & 0xffff0000));
        both[i] = (vi)smaller_word(even, odd);
        if (i + 1 < all && (first += size) >= dim) first = 0, x += call->x.row;
    }
    vw found = ordered((vw)(word_minima_of(both) ^ (int32_t)0xffff0000));
    uint16_t words[2 * LANES];
    store_words(words, (vi)found & 0xffff);
    store_words(words + LANES, (vi)((vu)found >> 16));
    store(low, widened((const char *)words, 0, dtype));
    store(high, widened((const char *)words, LANES, dtype));
}

/* Values: every group of channels of a token has a scale. `spare` holds 5 * TOKENS_OF_GROUPS * (dim / LANES + 1) numbers. */
INLINE int encode_channel_rows(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, float *spare, int64_t dtype) {
    const Codec *codec = call->codec;
    int64_t size = codec->size < codec->dim ? codec->size : codec->dim, groups = (codec->dim + size - 1) / size, all = count * groups;
    int64_t room = (all + LANES - 1) / LANES * LANES;
    float *low = spare, *high = low + room, *factor = high + room, *offset = factor + room;
    int32_t *pairs = (int32_t *)(offset + room);
    int of_words = dtype != F32 && size % (2 * LANES) == 0 && codec->dim % size == 0;
    for (int64_t n = 0; n < all; n += LANES) {
        int64_t t = start + n / groups, first = n % groups * size;
        if (of_words)
            channel_word_extremes(call, batch, head, t, first, size, all - n, dtype, low + n, high + n);
        else if (!channel_extremes(call, batch, head, t, first, size, all - n, dtype, low + n, high + n))
            return 0;
    }
    if (!extremes_are_finite(low, high, all) || !make_scales(call, low, high, all, factor, offset, pairs)) return 0;
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
