/* klt: values of the table of a run of columns, times the token's gain, plus the mean (formats/klt.py). Rows of the basis belong to a head,
   and to a run of tokens where the cache holds them: for each, the mean [dim], tables, and the matrix [dim][dim] from `matrix_place` on. */

/* Tokens [at, at + count) of the tile with the same rows of a basis. */
typedef struct {
    int64_t at, count;
    const float *rows;
} BasisTokens;

static BasisTokens basis_tokens(const Loaded *in, int64_t *run) {
    BasisTokens found = {in->run[*run].at, 0, (const float *)in->run[*run].pairs};
    for (; *run < in->runs && (const float *)in->run[*run].pairs == found.rows; ++*run) found.count += in->run[*run].count;
    /* Columns behind the last token are free. */
    if (*run == in->runs) found.count = TILE - found.at;
    return found;
}

/* `channels` holds the channel of every symbol of all packings in turn, and then the place of its table. */
static void klt_decode(const Codec *codec, const Loaded *in, float *tile) {
    int32_t code[TILE];
    float found[TILE];
    int64_t symbols = 0;
    for (int64_t part = 0; part < codec->packings; part++) symbols += codec->packing[part].symbols;
    for (int64_t run = 0; run < in->runs;) {
        BasisTokens own = basis_tokens(in, &run);
        for (int64_t d = 0; d < codec->dim; d++)
            for (int64_t t = own.at; t < own.at + own.count; t++) tile[d * TILE + t] = own.rows[d];
        const int32_t *channel = codec->channels;
        for (int64_t part = 0; part < codec->packings; part++) {
            const Packing *packing = &codec->packing[part];
            const uint16_t *words = packing_words(codec, in, part);
            int64_t entries = packing->digit[0].base < LEAST_ENTRIES ? LEAST_ENTRIES : packing->digit[0].base;
            for (int64_t i = 0; i < packing->symbols; i++, channel++) {
                const float *table = own.rows + channel[symbols];
                float mean = own.rows[*channel], *to = own.count == TILE ? tile + *channel * TILE : found;
                digits_of(packing, words, 0, i, code);
                for (int t = 0; t < TILE; t += LANES) {
                    vf value = lookup(table, entries, load_int(code + t));
                    if (codec->value_streams) value = value * load(in->numbers + t);
                    store(to + t, value + mean);
                }
                if (own.count < TILE) memcpy(tile + *channel * TILE + own.at, found + own.at, sizeof(float) * own.count);
            }
        }
    }
}
