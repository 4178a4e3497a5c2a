/* Encoding of group without a rotation: the scales, centers and codes of formats/group.py, bit for bit.

   Here and in encode_group_rows.h and encode_minifloat.h, the compiler chooses what to inline: with INLINE, encoders take the same time and
   three times the space. */

/* Number of tokens whose groups of channels are encoded together, so that their extremes fill vectors. */
enum { TOKENS_OF_GROUPS = 16 };

/* Converts values of any dtype to rows of `dim` floats followed by zeros. Returns false if a value is infinite or NaN. */
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

/* Computes the factors and offsets that convert values to codes, and the stored pairs, for `count` groups. Returns false if a scale or
   center is too large for binary16. The arrays have room for whole vectors. */
static int make_scales(const Encode *call, const float *low, const float *high, int64_t count, float *factor, float *offset, int32_t *pairs) {
    float middle = middle_of(call->codec);
    vi good = splat_int(-1);
    for (int64_t g = 0; g < count; g += LANES) {
        vf center = call->zero_center ? splat(0) : (load(low + g) + load(high + g)) * .5f;
        good &= larger(center, -center) < 65520.f;
        vi stored, stored_scale;
        center = rounded_to_half(center, &stored);
        vf scale = larger(load(high + g) - center, center - load(low + g)) * call->per_middle;
        good &= scale < 65520.f;
        vf own = 1.f / larger(rounded_to_half(scale, &stored_scale), splat(0x1p-24f));
        store(factor + g, own);
        store(offset + g, middle - center * own);
        store_int(pairs + g, stored_scale | stored << 16);
    }
    return all_of(good);
}

/* Returns the code nearest to a value in units of codes. */
static inline vi bounded_code(vf x, float largest) { return nearest_int(smaller(larger(splat(0), x), splat(largest))); }

/* Computes the words of the last plane if each of them contains the bytes of two columns, c and c + half of the width. The columns are
   followed by zeros. */
static inline void store_bytes(const Packing *packing, const int32_t *column, char *to) {
    int64_t half_width = (packing->width + 1) / 2;
    uint32_t shift = packing->planes == 2 ? 16 : 0;
    for (int64_t c = 0; c < half_width; c += LANES) {
        vu low = (vu)load_int(column + c) >> shift & 255, high = (vu)load_int(column + half_width + c) >> shift & 255;
        uint16_t words[LANES];
        store_words(words, (vi)(low | high << 8));
        if (half_width - c >= LANES)
            memcpy(to + 2 * c, words, sizeof words);
        else if (half_width - c == LANES / 2)
            memcpy(to + 2 * c, words, sizeof words / 2);
        else
            memcpy(to + 2 * c, words, 2 * (half_width - c));
    }
}

/* Computes the words of one token from its columns, which are followed by zeros. */
static void store_columns(const Packing *packing, const int32_t *column, char *low, char *high) {
    int64_t width = packing->width, planes = packing->planes - packing->odd;
    char *to[] = {low, high};
    for (int64_t p = 0; p < planes; p++) {
        uint16_t *words = (uint16_t *)to[p];
        int64_t c = 0;
        for (; c + LANES <= width; c += LANES) store_words(words + c, (vi)((vu)load_int(column + c) >> (uint32_t)(16 * p) & 0xffff));
        for (; c < width; c++) words[c] = (uint16_t)((uint32_t)column[c] >> 16 * p);
    }
    if (packing->odd) store_bytes(packing, column, high);
}

/* Computes the words of one token. Field k of column c is the code of channel k * width + c. */
static void pack_row(const Packing *packing, const int32_t *codes, char *low, char *high) {
    int64_t width = packing->width, fields = packing->symbols / width, bits = packing->digit[0].bits, c = 0;
    int32_t column[1024 + 2 * LANES];
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
    store_int(column + width, splat_int(0));
    store_columns(packing, column, low, high);
}

/* Encodes keys: `count` tokens from token `start` on share the scales of each channel. `spare` has room for (count + 4) rows of dim + LANES
   floats. */
static int encode_token_group(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, float *spare) {
    const Codec *codec = call->codec;
    const Packing *packing = &codec->packing[0];
    int64_t dim = codec->dim, stride = dim + LANES;
    float *low = spare, *high = low + stride, *factor = high + stride, *offset = factor + stride, *rows = offset + stride;
    float largest = (float)(packing->digit[0].base - 1);
    int32_t pairs[1024 + LANES], codes[1024 + LANES];
    for (int64_t t = 0; t < count; t++) {
        float *row = rows + t * stride;
        if (!read_row(row_of(&call->x, batch, head, start + t), call->dtype, dim, row)) return 0;
        for (int64_t d = 0; d < dim; d += LANES) {
            vf x = load(row + d);
            store(low + d, t ? smaller(x, load(low + d)) : x);
            store(high + d, t ? larger(x, load(high + d)) : x);
        }
    }
    for (int64_t d = dim; d < stride; d++) low[d] = high[d] = 0;
    if (!make_scales(call, low, high, dim, factor, offset, pairs)) return 0;
    memcpy(row_of(&call->streams[packing->planes], batch, head, start / codec->size), pairs, 4 * dim);
    for (int64_t t = 0; t < count; t++) {
        for (int64_t d = 0; d < dim; d += LANES)
            store_int(codes + d, bounded_code(load(rows + t * stride + d) * load(factor + d) + load(offset + d), largest));
        pack_row(packing, codes, row_of(call->streams, batch, head, start + t), row_of(&call->streams[packing->planes - 1], batch, head, start + t));
    }
    return 1;
}

/* Finds the minimum and maximum of every group of a row. */
static void group_extremes(const float *row, int64_t dim, int64_t size, float *low, float *high) {
    for (int64_t first = 0; first < dim; first += size, low++, high++) {
        *low = *high = row[first];
        for (int64_t d = first + 1; d < first + size && d < dim; d++) {
            *low = row[d] < *low ? row[d] : *low;
            *high = row[d] > *high ? row[d] : *high;
        }
    }
}

/* Encodes values: every `size` channels of a token share their scales. `spare` has room for 5 * TOKENS_OF_GROUPS rows of dim + LANES
   numbers. */
static int encode_channel_groups(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, float *spare) {
    const Codec *codec = call->codec;
    const Packing *packing = &codec->packing[0];
    int64_t dim = codec->dim, size = codec->size, groups = (dim + size - 1) / size, stride = dim + LANES, all = count * groups;
    float *rows = spare, *low = rows + TOKENS_OF_GROUPS * stride, *high = low + TOKENS_OF_GROUPS * stride;
    float *factor = high + TOKENS_OF_GROUPS * stride, *offset = factor + TOKENS_OF_GROUPS * stride;
    float largest = (float)(packing->digit[0].base - 1);
    int32_t *pairs = (int32_t *)(offset + TOKENS_OF_GROUPS * stride), codes[1024 + 128 + LANES];
    for (int64_t t = 0; t < count; t++) {
        if (!read_row(row_of(&call->x, batch, head, start + t), call->dtype, dim, rows + t * stride)) return 0;
        group_extremes(rows + t * stride, dim, size, low + t * groups, high + t * groups);
    }
    for (int64_t n = all; n < all + LANES; n++) low[n] = high[n] = 0;
    if (!make_scales(call, low, high, all, factor, offset, pairs)) return 0;
    for (int64_t t = 0; t < count; t++) {
        memcpy(row_of(&call->streams[packing->planes], batch, head, start + t), pairs + t * groups, 4 * groups);
        for (int64_t g = 0; g < groups; g++)
            for (int64_t d = g * size; d < (g + 1) * size && d < dim; d += LANES)
                store_int(codes + d, bounded_code(load(rows + t * stride + d) * factor[t * groups + g] + offset[t * groups + g], largest));
        pack_row(packing, codes, row_of(call->streams, batch, head, start + t), row_of(&call->streams[packing->planes - 1], batch, head, start + t));
    }
    return 1;
}
