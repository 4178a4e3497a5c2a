/* group: x = (code - middle) * scale + centre (formats/group.py). */

INLINE float middle_of(const Codec *codec) { return .5f * (float)(codec->packing[0].digit[0].base - 1); }

/* The scales and centres of a row of `dim` pairs. */
static void load_pairs(const Run *run, int64_t dim, float *scale, float *centre) {
    int64_t d = 0;
    for (; !run->table && d + LANES <= dim; d += LANES) {
        vi pairs = load_int((const int32_t *)run->pairs + d);
        store(scale + d, from_half(pairs & 0xffff));
        store(centre + d, from_half((vi)((vu)pairs >> 16)));
    }
    for (; d < dim; d++) {
        scale[d] = half(run->table ? word_at(run->table + 4 * (uint8_t)run->pairs[2 * d]) : word_at(run->pairs + 4 * d));
        centre[d] = half(run->table ? word_at(run->table + 4 * (uint8_t)run->pairs[2 * d + 1] + 2) : word_at(run->pairs + 4 * d + 2));
    }
}

static void group_decode(const Codec *codec, const Loaded *in, float *spare, float *tile) {
    int32_t code[TILE];
    float middle = middle_of(codec), row_scale[TILE] = {0}, row_centre[TILE] = {0};
    int64_t groups = (codec->dim + codec->size - 1) / codec->size;
    float *scales = spare, *centres = spare + in->runs * codec->dim;
    for (int64_t r = 0; r < in->runs; r++) load_pairs(&in->run[r], codec->dim, scales + r * codec->dim, centres + r * codec->dim);
    for (int64_t d = 0; d < codec->dim; d++) {
        const float *scale = row_scale, *centre = row_centre;
        if (codec->scales_stream < 0) {
            scale = in->numbers + 2 * (d / codec->size) * TILE;
            centre = scale + TILE;
        } else
            for (int64_t r = 0; r < in->runs; r++)
                for (int64_t t = in->run[r].at; t < in->run[r].at + in->run[r].count; t++) {
                    row_scale[t] = scales[r * codec->dim + d];
                    row_centre[t] = centres[r * codec->dim + d];
                }
        digits_of(&codec->packing[0], in->words, 0, d, code);
        for (int t = 0; t < TILE; t += LANES)
            store(tile + d * TILE + t, (to_float(load_int(code + t)) - middle) * load(scale + t) + load(centre + t));
    }
    if (!codec->token_scale) return;
    const float *factor = in->numbers + (codec->scales_stream < 0 ? 2 * groups : 0) * TILE;
    for (int64_t d = 0; d < codec->dim; d++)
        for (int t = 0; t < TILE; t += LANES) store(tile + d * TILE + t, load(tile + d * TILE + t) * load(factor + t));
}
