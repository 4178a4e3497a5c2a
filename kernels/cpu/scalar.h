/* scalar: entries of a table of signed magnitudes, times the token's norm (formats/scalar.py). Each part has separate channels. */

static void scalar_decode(const Codec *codec, const Loaded *in, float *tile) {
    int32_t code[TILE];
    const int32_t *channel = codec->channels;
    for (int64_t part = 0; part < codec->packings; part++) {
        const Packing *packing = &codec->packing[part];
        const uint16_t *words = packing_words(codec, in, part);
        const Table *table = &codec->table[part];
        for (int64_t i = 0; i < packing->symbols; i++) {
            float *row = tile + *channel++ * TILE;
            digits_of(packing, words, 0, i, code);
            for (int t = 0; t < TILE; t += LANES)
                store(row + t, lookup(table->data, table->entries, load_int(code + t)) * load(in->numbers + t));
        }
    }
}
