/* Side-cars of the coded frame, after a codec's decoder (formats/side_cars.py). */

enum { CHUNK = 4, OUTLIER_BYTES = 10 };

/* outliers: chunks in their places. */
static void put_outliers(const Loaded *in, float *tile) {
    for (int64_t t = 0; t < in->tokens; t++)
        for (int64_t i = 0; i < in->outliers[t].count; i++) {
            const char *chunk = in->outliers[t].chunks + i * OUTLIER_BYTES;
            float *to = tile + (int64_t)word_at(chunk + 2 * CHUNK) * CHUNK * TILE + t;
            for (int k = 0; k < CHUNK; k++) to[k * TILE] = half(word_at(chunk + 2 * k));
        }
}

/* qjl: adds the residuals, signs rotated back times a size per token. `spare` holds two tiles. */
static void add_sketch(const Codec *codec, const Loaded *in, float *spare, float *tile) {
    const Packing *packing = &codec->packing[codec->packings];
    const uint16_t *words = packing_words(codec, in, codec->packings);
    const float *norm = in->numbers + (codec->numbers - 1) * TILE;
    int32_t negative[TILE];
    for (int64_t d = 0; d < codec->dim; d++) {
        digits_of(packing, words, 0, d, negative);
        for (int t = 0; t < TILE; t += LANES) store(spare + d * TILE + t, to_float(1 - 2 * load_int(negative + t)));
    }
    rotate_back(&codec->sketch_rotation, codec->dim, spare, spare + codec->dim * TILE);
    for (int64_t d = 0; d < codec->dim; d++)
        for (int t = 0; t < TILE; t += LANES)
            store(tile + d * TILE + t, load(tile + d * TILE + t) + load(spare + d * TILE + t) * (load(norm + t) * codec->sketch_size));
}

static void put_side_cars(const Codec *codec, const Loaded *in, float *spare, float *tile) {
    if (codec->outlier_stream >= 0) put_outliers(in, tile);
    if (codec->sketches) add_sketch(codec, in, spare, tile);
    for (int64_t i = 0; i < in->patches; i++)
        for (int64_t d = 0; d < codec->dim; d++) memcpy(tile + d * TILE + in->patch[i].at, in->patch[i].values + 4 * d, 4);
}

/* Whether what the codec decodes is what is stored, but for raw tokens. */
INLINE int is_plain(const Codec *codec) { return codec->outlier_stream < 0 && !codec->sketches; }
