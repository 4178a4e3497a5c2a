/* Returns the values in 32-bit words. If values have 16 bits, they are the ones in the high halves of the words if `high` is set, and
   otherwise those in the low halves. */
INLINE vf value_of(vu word, int high, int64_t dtype) {
    if (dtype == BF16) return (vf)(high ? word & 0xffff0000 : word << 16);
    return dtype == F16 ? from_half((vi)(high ? word >> 16 : word & 0xffff)) : (vf)word;
}

/* Encoding of group if blocks of channels, columns and groups are whole vectors. Rows are read twice in place, for the extremes of groups and
   for codes, which go straight to words: there is no tile to write and transpose. */

enum { BLOCK = 2 * LANES, ROWS_AT_ONCE = 4 };

static int has_rows_to_encode(const Encode *call) {
    const Codec *codec = call->codec;
    int64_t width = codec->packing[0].width;
    if (codec->dim % BLOCK || (width < BLOCK ? BLOCK % width : width % BLOCK)) return 0;
    return codec->scales_stream >= 0 || codec->size % BLOCK == 0 || codec->size >= codec->dim;
}

static inline vf widened(const char *row, int64_t d, int64_t dtype) {
    if (dtype == F32) return load((const float *)row + d);
    if (dtype == F16) return load_half((const uint16_t *)row + d);
    return (vf)(load_words((const uint16_t *)row + d) << 16);
}

/* BLOCK numbers, those of even channels and those of odd channels, which are the halves of 32-bit words in bf16. */
typedef struct {
    vf even, odd;
} Numbers;

static inline Numbers apart(vf a, vf b) { return (Numbers){SHUFFLE(vf, vi, a, b, EVEN), SHUFFLE(vf, vi, a, b, ODD)}; }

static inline Numbers load_numbers_apart(const char *row, int64_t d, int64_t dtype) {
    if (dtype != BF16) return apart(widened(row, d, dtype), widened(row, d + LANES, dtype));
    vu words = (vu)load_int((const int32_t *)(row + 2 * d));
    return (Numbers){(vf)(words << 16), (vf)(words & 0xffff0000)};
}

/* Returns 1 if all codes of `count` groups are in range. Codes increase with values, so checking the extremes is enough. */
static int are_in_range(const Encode *call, const float *low, const float *high, int64_t count, const float *factor, const float *offset) {
    float end = (float)call->codec->packing[0].digit[0].base - .5f;
    vi good = splat_int(-1);
    for (int64_t g = 0; g < count; g += LANES) {
        vf own = load(factor + g), more = load(offset + g);
        good &= (load(low + g) * own + more >= -.5f) & (load(high + g) * own + more < end);
    }
    return all_of(good);
}

/* Factors and offsets of tokens. There is one per channel, or, with `groups` groups per token, one per group. */
typedef struct {
    const float *factor, *offset;
    int64_t groups;
    int in_range;
} Scaling;

enum { COLUMNS = 1024 + BLOCK };

/* Computes the words of LANES columns, starting with column `c`, in the planes that have one word per column. */
static inline void store_column_words(const Packing *packing, int64_t c, vi column, char *low, char *high) {
    int64_t planes = packing->planes - packing->odd;
    if (planes > 0) store_words((uint16_t *)low + c, column);
    if (planes > 1) store_words((uint16_t *)high + c, (vi)((vu)column >> 16));
}

/* Computes the plane of bytes for BLOCK columns, or for the first LANES of them. */
static inline void store_column_bytes(const Packing *packing, vi first, vi second, char *to) {
    uint32_t shift = packing->planes == 2 ? 16 : 0;
    vu low = (vu)first >> shift & 255, high = (vu)second >> shift & 255;
    uint16_t words[LANES];
    if (packing->width == BLOCK) {
        store_words((uint16_t *)to, (vi)(low | high << 8));
        return;
    }
    store_words(words, (vi)(low | (vu)SHUFFLE(vi, vi, (vi)low, (vi)low, SWAPPED) << 8));
    memcpy(to, words, sizeof words / 2);
}

/* Computes the words of `rows` tokens, which start at `low` and `high`, and prefetches the rows that are `ahead` of them. */
static inline void encode_rows(const Encode *call, const char *x, int64_t ahead, const Scaling *scaling, char *low, char *high, int rows,
                               int of_channels,
                        int in_range, int64_t dtype) {
    const Codec *codec = call->codec;
    const Packing *packing = &codec->packing[0];
    const Stream *lower = call->streams, *upper = call->streams + packing->planes - 1;
    int64_t width = packing->width, dim = codec->dim, across = width < BLOCK ? BLOCK : width;
    int size = __builtin_ctzll((uint64_t)codec->size), fields = width < BLOCK ? BLOCK >> __builtin_ctzll((uint64_t)width) : 1;
    int whole = width >= LANES && (!packing->odd || width <= BLOCK);
    int32_t field = (int32_t)packing->digit[0].bits, column[ROWS_AT_ONCE][COLUMNS];
    float largest = (float)(packing->digit[0].base - 1);
    /* If a block contains all fields of a column, only zeros are shifted out. */
    vi bits = splat_int(field * fields & 31);
    for (int64_t c = 0; c < across; c += BLOCK) {
        vi even[ROWS_AT_ONCE], odd[ROWS_AT_ONCE];
        for (int r = 0; r < rows; r++) even[r] = odd[r] = splat_int(0);
        /* The loop starts with the last field, so that every shift moves all codes that were added before. */
        for (int64_t d = dim - across + c; d >= 0; d -= across) {
            Numbers factor, offset;
            if (of_channels) {
                factor = (Numbers){load(scaling->factor + d), load(scaling->factor + d + LANES)};
                offset = (Numbers){load(scaling->offset + d), load(scaling->offset + d + LANES)};
            }
            for (int r = 0; r < rows; r++) {
                const char *row = x + r * call->x.row;
                int64_t group = r * scaling->groups + (d >> size);
                if (!of_channels) {
                    factor.even = factor.odd = splat(scaling->factor[group]);
                    offset.even = offset.odd = splat(scaling->offset[group]);
                }
                for (int64_t i = 0; i < BLOCK * (dtype == F32 ? 4 : 2); i += CACHE_LINE)
                    __builtin_prefetch(row + ahead + d * (dtype == F32 ? 4 : 2) + i, 0, 2);
                Numbers value = load_numbers_apart(row, d, dtype);
                vf first = value.even * factor.even + offset.even, second = value.odd * factor.odd + offset.odd;
                even[r] = (even[r] << bits) | (in_range ? nearest_int(first) : bounded_code(first, largest));
                odd[r] = (odd[r] << bits) | (in_range ? nearest_int(second) : bounded_code(second, largest));
            }
        }
        for (int r = 0; r < rows; r++) {
            vi first = SHUFFLE(vi, vi, even[r], odd[r], LOW), second = SHUFFLE(vi, vi, even[r], odd[r], HIGH);
            if (fields > 1) first |= second << (field * (fields / 2));
            if (whole) {
                char *to = low + r * lower->row, *above = high + r * upper->row;
                store_column_words(packing, c, first, to, above);
                if (fields == 1) store_column_words(packing, c + LANES, second, to, above);
                if (packing->odd) store_column_bytes(packing, first, fields == 1 ? second : splat_int(0), above);
            } else {
                store_int(column[r] + c, first);
                store_int(column[r] + c + LANES, second);
            }
        }
    }
    for (int r = 0; r < rows && !whole; r++) {
        /* A vector of several fields of each column. */
        for (int64_t half = LANES / 2; half >= width; half /= 2)
            store_int(column[r], load_int(column[r]) | load_int(column[r] + half) << (field * (int32_t)(half >> __builtin_ctzll((uint64_t)width))));
        store_int(column[r] + width, splat_int(0));
        store_columns(packing, column[r], low + r * lower->row, high + r * upper->row);
    }
}

/* The words of `count` tokens. */
static inline void encode_tokens(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, Scaling scaling,
                                 int of_channels,
                          int64_t dtype) {
    const Stream *lower = call->streams, *upper = call->streams + call->codec->packing[0].planes - 1;
    int64_t ahead = count * call->x.row;
    for (int64_t t = start, rows; t < start + count; t += rows) {
        const char *x = row_of(&call->x, batch, head, t);
        char *low = row_of(lower, batch, head, t), *high = row_of(upper, batch, head, t);
        rows = start + count - t < ROWS_AT_ONCE ? 1 : ROWS_AT_ONCE;
        if (rows == 1)
            encode_rows(call, x, ahead, &scaling, low, high, 1, of_channels, 0, dtype);
        else if (scaling.in_range)
            encode_rows(call, x, ahead, &scaling, low, high, ROWS_AT_ONCE, of_channels, 1, dtype);
        else
            encode_rows(call, x, ahead, &scaling, low, high, ROWS_AT_ONCE, of_channels, 0, dtype);
        scaling.factor += rows * scaling.groups;
        scaling.offset += rows * scaling.groups;
    }
}

/* Converts bf16 or binary16 numbers to integers with the same order, and back. */
static inline vw ordered(vw x) { return x ^ ((x >> 15) & 0x7fff); }

static inline vw ordered_words(const char *row, int64_t d) { return ordered(*(const vw_any *)(row + 2 * d)); }

/* Returns whether all numbers with these extremes are finite. */
static inline int extremes_are_finite(const float *low, const float *high, int64_t count) {
    vf none = splat(0);
    for (int64_t n = 0; n < count; n += LANES) none += (load(low + n) + load(high + n)) * 0.f;
    return is_finite(none);
}

/* Finds the extremes of LANES channels, beginning with channel `d`, over `count` tokens; returns false if one is infinite or NaN. */
static inline int token_extremes(const char *x, int64_t stride, int64_t count, int64_t d, int64_t dtype, float *low, float *high) {
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

/* Does the same for `vectors` vectors of words, which are compared before they are widened. NaN counts as an extreme value. */
static inline void token_word_extremes(const char *x, int64_t stride, int64_t count, int64_t d, int vectors, int64_t dtype, float *low,
                                       float *high) {
    vw least[4], most[4];
    for (int i = 0; i < vectors; i++) least[i] = most[i] = ordered_words(x, d + i * BLOCK);
    for (int64_t t = 1; t < count; t++)
        for (int i = 0; i < vectors; i++) {
            vw value = ordered_words(x + t * stride, d + i * BLOCK);
            least[i] = smaller_word(value, least[i]);
            most[i] = larger_word(value, most[i]);
        }
    for (int i = 0; i < vectors; i++) {
        vw words[2] = {ordered(least[i]), ordered(most[i])};
        for (int half = 0; half < 2; half++) {
            store(low + d + i * BLOCK + half * LANES, widened((const char *)&words[0], half * LANES, dtype));
            store(high + d + i * BLOCK + half * LANES, widened((const char *)&words[1], half * LANES, dtype));
        }
    }
}

/* Encodes keys: `count` tokens share the scales of each channel. `spare` has room for 4 * dim floats. */
static inline int encode_token_rows(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, float *spare,
                                    int64_t dtype) {
    int64_t dim = call->codec->dim, stride = call->x.row;
    float *low = spare, *high = low + dim, *factor = high + dim, *offset = factor + dim;
    const char *x = row_of(&call->x, batch, head, start);
    char *pairs = row_of(&call->streams[call->codec->packing[0].planes], batch, head, start / call->codec->size);
    if (dtype == F32) {
        for (int64_t d = 0; d < dim; d += LANES)
            if (!token_extremes(x, stride, count, d, dtype, low, high)) return 0;
    } else {
        int64_t d = 0;
        for (; d + 4 * BLOCK <= dim; d += 4 * BLOCK) token_word_extremes(x, stride, count, d, 4, dtype, low, high);
        for (; d < dim; d += BLOCK) token_word_extremes(x, stride, count, d, 1, dtype, low, high);
        if (!extremes_are_finite(low, high, dim)) return 0;
    }
    if (!make_scales(call, low, high, dim, factor, offset, (int32_t *)pairs)) return 0;
    int in_range = are_in_range(call, low, high, dim, factor, offset);
    for (float *own = factor; own < factor + 2 * dim; own += BLOCK) {
        Numbers found = apart(load(own), load(own + LANES));
        store(own, found.even);
        store(own + LANES, found.odd);
    }
    encode_tokens(call, batch, head, start, count, (Scaling){factor, offset, 0, in_range}, 1, dtype);
    return 1;
}

/* Finds the minimum and maximum of LANES groups of `size` channels, from channel `first` of token `t` on. After the last of `all` groups,
   the last group is repeated. */
static inline int channel_extremes(const Encode *call, int64_t batch, int64_t head, int64_t t, int64_t first, int64_t size, int64_t all,
                                   int64_t dtype,
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

static inline vw exchanged(vw x) { return (vw)((vu)x << 16 | (vu)x >> 16); }

/* Does the same for whole vectors of words, including infinities and NaN. Maxima are found as minima of the inverted bits, so that both are
   found in one pass. If `one` is set, a group is a single vector. */
static inline void channel_word_extremes(const Encode *call, int64_t batch, int64_t head, int64_t t, int64_t first, int64_t size,
                                         int64_t all, int one,
                                 int64_t dtype, float *low, float *high) {
    int64_t dim = call->codec->dim;
    const char *x = row_of(&call->x, batch, head, t);
    vi both[LANES];
#pragma GCC unroll 16
    for (int64_t i = 0; i < LANES; i++) {
        vw least = ordered_words(x, first), most = least;
        int64_t end = one ? first : first + size < dim ? first + size : dim;
        for (int64_t d = first + BLOCK; d < end; d += BLOCK) {
            vw value = ordered_words(x, d);
            least = smaller_word(value, least);
            most = larger_word(value, most);
        }
        least = smaller_word(least, exchanged(least));
        most = larger_word(most, exchanged(most));
        both[i] = (vi)(((vu)least & 0xffff) | (~(vu)most & 0xffff0000));
        if (i + 1 < all && (first += size) >= dim) first = 0, x += call->x.row;
    }
    vw found = ordered((vw)(word_minima_of(both) ^ (int32_t)0xffff0000));
    uint16_t words[BLOCK];
    store_words(words, (vi)found & 0xffff);
    store_words(words + LANES, (vi)((vu)found >> 16));
    store(low, widened((const char *)words, 0, dtype));
    store(high, widened((const char *)words, LANES, dtype));
}

/* Encodes values: every group of channels of a token has a scale. `spare` has room for 5 * TOKENS_OF_GROUPS * (dim / LANES + 1) numbers. */
static inline int encode_channel_rows(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, float *spare,
                                      int64_t dtype) {
    const Codec *codec = call->codec;
    int64_t size = codec->size < codec->dim ? codec->size : codec->dim, groups = (codec->dim + size - 1) / size, all = count * groups;
    int64_t room = (all + LANES - 1) / LANES * LANES;
    float *low = spare, *high = low + room, *factor = high + room, *offset = factor + room;
    int32_t *pairs = (int32_t *)(offset + room);
    const Stream *scales = &call->streams[codec->packing[0].planes];
    char *stored = row_of(scales, batch, head, start);
    int in_place = scales->row == 4 * groups && all % LANES == 0;
    for (int64_t n = 0; n < all; n += LANES) {
        int64_t t = start + n / groups, first = n % groups * size;
        if (dtype == F32) {
            if (!channel_extremes(call, batch, head, t, first, size, all - n, dtype, low + n, high + n)) return 0;
        } else if (size == BLOCK)
            channel_word_extremes(call, batch, head, t, first, size, all - n, 1, dtype, low + n, high + n);
        else
            channel_word_extremes(call, batch, head, t, first, size, all - n, 0, dtype, low + n, high + n);
    }
    if (!extremes_are_finite(low, high, all)) return 0;
    if (!make_scales(call, low, high, all, factor, offset, in_place ? (int32_t *)stored : pairs)) return 0;
    for (int64_t t = 0; t < count && !in_place; t++) memcpy(stored + t * scales->row, pairs + t * groups, 4 * groups);
    encode_tokens(call, batch, head, start, count, (Scaling){factor, offset, groups, are_in_range(call, low, high, all, factor, offset)}, 0, dtype);
    return 1;
}

static inline int encode_groups_of(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t stop, float *spare,
                                   int64_t dtype) {
    int64_t step = call->codec->scales_stream < 0 ? TOKENS_OF_GROUPS : call->codec->size;
    for (; start < stop; start += step) {
        int64_t count = stop - start < step ? stop - start : step;
        int done = call->codec->scales_stream < 0 ? encode_channel_rows(call, batch, head, start, count, spare, dtype)
                                                  : encode_token_rows(call, batch, head, start, count, spare, dtype);
        if (!done) return 0;
    }
    return 1;
}

/* Encodes tokens [start, stop) of one head; `start` begins a token group. Returns false if formats/ must reject a value. */
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
