/* Encoding of group without a rotation: the scales, centres and codes of formats/group.py, bit for bit. */

/* Rows of `dim` floats from values of any dtype, zero beyond the last; false where one is infinite or NaN. */
static int read_row(const char *from, int64_t dtype, int64_t dim, float *row) {
    vf bad = splat(0);
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) {
        vf x = dtype == F32 ? load((const float *)from + d) : dtype == F16 ? from_half(load_words((const uint16_t *)from + d))
                                                                          : (vf)(load_words((const uint16_t *)from + d) << 16);
        bad += x * 0.f;
        store(row + d, x);
    }
    float rest = sum_of(bad);
    for (; d < dim; d++) {
        uint32_t bits = dtype == F32 ? 0 : (uint32_t)word_at(from + 2 * d) << 16;
        if (dtype == F16)
            row[d] = half(word_at(from + 2 * d));
        else
            memcpy(row + d, dtype == F32 ? (const void *)(from + 4 * d) : &bits, 4);
        rest += row[d] * 0.f;
    }
    for (int64_t i = dim; i < dim + LANES; i++) row[i] = 0;
    return rest == 0;
}

/* What a value is multiplied by and what is added to make its code, and the stored pairs, of `count` groups; false where a scale or
   centre is beyond binary16. The arrays have room for whole vectors. */
static int make_scales(const Encode *call, const float *low, const float *high, int64_t count, float *factor, float *offset, int32_t *pairs) {
    float middle = middle_of(call->codec);
    vi good = splat_int(-1);
    for (int64_t g = 0; g < count; g += LANES) {
        vf centre = call->zero_centre ? splat(0) : (load(low + g) + load(high + g)) * .5f;
        good &= larger(centre, -centre) < 65520.f;
        vi stored = to_half(centre);
        centre = from_half(stored);
        vf scale = larger(load(high + g) - centre, centre - load(low + g)) * call->per_middle;
        good &= scale < 65520.f;
        vi stored_scale = to_half(scale);
        vf own = 1.f / larger(from_half(stored_scale), splat(0x1p-24f));
        store(factor + g, own);
        store(offset + g, middle - centre * own);
        store_int(pairs + g, stored_scale | stored << 16);
    }
    for (int i = 0; i < LANES; i++)
        if (!good[i]) return 0;
    return 1;
}

/* Codes of one token, as integers. */
INLINE vi codes_of(vf x, vf factor, vf offset, float largest) {
    const vf magic = splat(12582912.f);
    vf code = x * factor + offset;
    code = larger(splat(0), code);
    code = -larger(-code, splat(-largest));
    return (vi)(code + magic) - (vi)magic;
}

/* The words of one token: field k of column c is the code of channel k * width + c. */
static void pack_row(const Packing *packing, const int32_t *codes, char *low, char *high) {
    int64_t width = packing->width, fields = packing->symbols / width, bits = packing->digit[0].bits, c = 0;
    int32_t column[1024 + LANES];
    for (; c + LANES <= width; c += LANES) {
        vi all = load_int(codes + c);
        for (int64_t k = 1; k < fields; k++) all |= load_int(codes + k * width + c) << (int32_t)(k * bits);
        store_int(column + c, all);
    }
    for (; c < width; c++) {
        uint32_t all = 0;
        for (int64_t k = 0; k < fields; k++) all |= (uint32_t)codes[k * width + c] << (k * bits);
        column[c] = (int32_t)all;
    }
    uint16_t *words = (uint16_t *)low, *upper = (uint16_t *)high;
    int64_t half_width = (width + 1) / 2;
    if (packing->planes == 2 || !packing->odd)
        for (c = 0; c < width; c++) words[c] = (uint16_t)column[c];
    else
        upper = words;
    int shift = packing->planes == 2 ? 16 : 0;
    if (packing->odd)
        for (c = 0; c < half_width; c++) {
            uint32_t second = c + half_width < width ? (uint32_t)column[c + half_width] >> shift & 255 : 0;
            upper[c] = (uint16_t)(((uint32_t)column[c] >> shift & 255) | second << 8);
        }
    else if (packing->planes == 2)
        for (c = 0; c < width; c++) upper[c] = (uint16_t)((uint32_t)column[c] >> 16);
}

/* Keys: `count` tokens from `start` on share the scales of each channel. `spare` holds (count + 4) rows of dim + LANES floats. */
static int encode_token_group(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, float *spare) {
    const Codec *codec = call->codec;
    const Packing *packing = &codec->packing[0];
    int64_t dim = codec->dim, stride = dim + LANES;
    float *low = spare, *high = low + stride, *factor = high + stride, *offset = factor + stride, *rows = offset + stride;
    int32_t pairs[1024 + LANES], codes[1024 + LANES];
    for (int64_t t = 0; t < count; t++) {
        float *row = rows + t * stride;
        if (!read_row(row_of(&call->x, batch, head, start + t), call->dtype, dim, row)) return 0;
        for (int64_t d = 0; d < dim; d += LANES) {
            vf x = load(row + d);
            store(low + d, t ? -larger(-x, -load(low + d)) : x);
            store(high + d, t ? larger(x, load(high + d)) : x);
        }
    }
    for (int64_t d = dim; d < stride; d++) low[d] = high[d] = 0;
    if (!make_scales(call, low, high, dim, factor, offset, pairs)) return 0;
    memcpy(row_of(&call->streams[packing->planes], batch, head, start / codec->size), pairs, 4 * dim);
    for (int64_t t = 0; t < count; t++) {
        for (int64_t d = 0; d < dim; d += LANES)
            store_int(codes + d, codes_of(load(rows + t * stride + d), load(factor + d), load(offset + d), (float)(packing->digit[0].base - 1)));
        pack_row(packing, codes, row_of(call->streams, batch, head, start + t), row_of(&call->streams[packing->planes - 1], batch, head, start + t));
    }
    return 1;
}

/* Tokens whose groups of channels are encoded together, so that their extremes fill vectors. */
enum { ROWS_AT_ONCE = 8 };

/* low and high of every group of a row: whole vectors of partial extremes first, LANES groups of them reduced together. */
static void group_extremes(const float *rows, int64_t stride, int64_t count, int64_t dim, int64_t size, float *low, float *high) {
    int64_t groups = (dim + size - 1) / size, all = count * groups;
    if (size % LANES || dim % size) {
        for (int64_t n = 0; n < all; n++) {
            const float *row = rows + n / groups * stride;
            int64_t first = n % groups * size, end = first + size < dim ? first + size : dim;
            low[n] = high[n] = row[first];
            for (int64_t d = first + 1; d < end; d++) {
                low[n] = row[d] < low[n] ? row[d] : low[n];
                high[n] = row[d] > high[n] ? row[d] : high[n];
            }
        }
        return;
    }
    for (int64_t n = 0; n < all; n += LANES) {
        vf least[LANES], most[LANES];
        for (int i = 0; i < LANES; i++) {
            int64_t group = n + i < all ? n + i : n;
            const float *from = rows + group / groups * stride + group % groups * size;
            vf lower = -load(from), upper = load(from);
            for (int64_t d = LANES; d < size; d += LANES) {
                lower = larger(-load(from + d), lower);
                upper = larger(load(from + d), upper);
            }
            least[i] = lower;
            most[i] = upper;
        }
        store(low + n, -maxima_of(least));
        store(high + n, maxima_of(most));
    }
}

/* Values: every `size` channels of a token share their scales. `spare` holds 6 * ROWS_AT_ONCE rows of dim + LANES numbers. */
static int encode_channel_groups(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, float *spare) {
    const Codec *codec = call->codec;
    const Packing *packing = &codec->packing[0];
    int64_t dim = codec->dim, size = codec->size, groups = (dim + size - 1) / size, stride = dim + LANES, all = count * groups;
    float *rows = spare, *low = rows + ROWS_AT_ONCE * stride, *high = low + ROWS_AT_ONCE * stride;
    float *factor = high + ROWS_AT_ONCE * stride, *offset = factor + ROWS_AT_ONCE * stride;
    int32_t *pairs = (int32_t *)(offset + ROWS_AT_ONCE * stride), codes[1024 + 128 + LANES];
    for (int64_t t = 0; t < count; t++)
        if (!read_row(row_of(&call->x, batch, head, start + t), call->dtype, dim, rows + t * stride)) return 0;
    group_extremes(rows, stride, count, dim, size, low, high);
    for (int64_t n = all; n < all + LANES; n++) low[n] = high[n] = 0;
    if (!make_scales(call, low, high, all, factor, offset, pairs)) return 0;
    for (int64_t t = 0; t < count; t++) {
        memcpy(row_of(&call->streams[packing->planes], batch, head, start + t), pairs + t * groups, 4 * groups);
        for (int64_t g = 0; g < groups; g++)
            for (int64_t d = g * size; d < (g + 1) * size && d < dim; d += LANES)
                store_int(codes + d, codes_of(load(rows + t * stride + d), splat(factor[t * groups + g]), splat(offset[t * groups + g]),
                                              (float)(packing->digit[0].base - 1)));
        pack_row(packing, codes, row_of(call->streams, batch, head, start + t), row_of(&call->streams[packing->planes - 1], batch, head, start + t));
    }
    return 1;
}

/* Tokens [start, stop) of one head, from the first of a token group on; false where formats/ is to refuse a value. */
static int encode_groups(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t stop, float *spare) {
    if (call->codec->scales_stream < 0) {
        for (; start < stop; start += ROWS_AT_ONCE)
            if (!encode_channel_groups(call, batch, head, start, stop - start < ROWS_AT_ONCE ? stop - start : ROWS_AT_ONCE, spare)) return 0;
        return 1;
    }
    for (int64_t size = call->codec->size; start < stop; start += size)
        if (!encode_token_group(call, batch, head, start, stop - start < size ? stop - start : size, spare)) return 0;
    return 1;
}
