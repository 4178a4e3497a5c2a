/* group: x = (code - middle) * scale + center (formats/group.py). */

INLINE float middle_of(const Codec *codec) { return .5f * (float)(codec->packing[0].digit[0].base - 1); }

/* The scales and centers of a row of `dim` pairs. */
static void load_pairs(const Run *run, int64_t dim, float *scale, float *center) {
    int64_t d = 0;
    for (; !run->table && d + LANES <= dim; d += LANES) {
        vi pairs = load_int((const int32_t *)run->pairs + d);
        store(scale + d, from_half(pairs & 0xffff));
        store(center + d, from_half((vi)((vu)pairs >> 16)));
    }
    for (; d < dim; d++) {
        scale[d] = half(run->table ? word_at(run->table + 4 * (uint8_t)run->pairs[2 * d]) : word_at(run->pairs + 4 * d));
        center[d] = half(run->table ? word_at(run->table + 4 * (uint8_t)run->pairs[2 * d + 1] + 2) : word_at(run->pairs + 4 * d + 2));
    }
}

static void group_decode(const Codec *codec, const Loaded *in, float *spare, float *tile) {
    int32_t code[TILE];
    float middle = middle_of(codec), row_scale[TILE] = {0}, row_center[TILE] = {0};
    int64_t groups = (codec->dim + codec->size - 1) / codec->size;
    float *scales = spare, *centers = spare + in->runs * codec->dim;
    for (int64_t r = 0; r < in->runs; r++) load_pairs(&in->run[r], codec->dim, scales + r * codec->dim, centers + r * codec->dim);
    for (int64_t d = 0; d < codec->dim; d++) {
        const float *scale = row_scale, *center = row_center;
        if (codec->scales_stream < 0) {
            scale = in->numbers + 2 * (d / codec->size) * TILE;
            center = scale + TILE;
        } else
            for (int64_t r = 0; r < in->runs; r++)
                for (int64_t t = in->run[r].at; t < in->run[r].at + in->run[r].count; t++) {
                    row_scale[t] = scales[r * codec->dim + d];
                    row_center[t] = centers[r * codec->dim + d];
                }
        digits_of(&codec->packing[0], in->words, 0, d, code);
        for (int t = 0; t < TILE; t += LANES)
            store(tile + d * TILE + t, (to_float(load_int(code + t)) - middle) * load(scale + t) + load(center + t));
    }
    if (!codec->token_scale) return;
    const float *factor = in->numbers + (codec->scales_stream < 0 ? 2 * groups : 0) * TILE;
    for (int64_t d = 0; d < codec->dim; d++)
        for (int t = 0; t < TILE; t += LANES) store(tile + d * TILE + t, load(tile + d * TILE + t) * load(factor + t));
}

/* Returns whether columns of the packing contain all channels in fields of at most 32 bits. */
static int is_fusable(const Packing *packing) {
    return packing->planes <= 2 && packing->symbols % packing->width == 0;
}

/* A plane of bytes, two columns per word: those of columns [column, column + LANES). */
INLINE vi load_bytes(const Packing *packing, const char *plane, int64_t column) {
    const uint16_t *bytes = (const uint16_t *)plane;
    int64_t words = packing->width / 2;
    if (column + LANES <= words) return load_words(bytes + column) & 255;
    if (column >= words) return (vi)((vu)load_words(bytes + column - words) >> 8);
    if (packing->width == LANES) {
        vb both;
        memcpy(&both, bytes, sizeof both);
        return from_octets(SHUFFLE(vb, vb_mask, both, both, APART));
    }
    int32_t found[LANES];
    for (int64_t i = 0; i < LANES; i++) found[i] = column + i < words ? bytes[column + i] & 255 : bytes[column + i - words] >> 8;
    return load_int(found);
}

/* Loads the fields of columns [column, column + LANES) of one token as they are stored. The width is a multiple of LANES. */
INLINE vi load_columns(const Packing *packing, const char *low, const char *high, int64_t column) {
    if (packing->planes == 1) return packing->odd ? load_bytes(packing, low, column) : load_words((const uint16_t *)low + column);
    vi upper = packing->odd ? load_bytes(packing, high, column) : load_words((const uint16_t *)high + column);
    return load_words((const uint16_t *)low + column) | upper << 16;
}
