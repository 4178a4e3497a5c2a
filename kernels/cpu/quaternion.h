/* quaternion: one of 24 S unit quaternions, times a radius code and the token's step (formats/quaternion.py). */

static void quaternion_decode(const Codec *codec, const Loaded *in, float *spare, float *tile) {
    int32_t codeword[TILE], radius[TILE];
    const Packing *packing = codec->packing;
    for (int t = 0; t < TILE; t += LANES) store(spare + t, load(in->numbers + t) / codec->highest);
    for (int64_t i = 0; 4 * i < codec->dim; i++) {
        digits_of(packing, in->words, 0, i, codeword);
        if (codec->factored) digits_of(&packing[1], packing_words(codec, in, 1), 0, i, radius);
        for (int t = 0; t < TILE; t += LANES) {
            vi high = codec->factored ? load_int(radius + t) * (int32_t)packing[0].digit[0].base : splat_int(0);
            store_int(codeword + t, (load_int(codeword + t) + high) << 2);
        }
        if (codec->direct)
            digits_of(packing, in->words, 1, i, radius);
        else
            digits_of(&packing[codec->packings - 1], packing_words(codec, in, codec->packings - 1), 0, i, radius);
        int64_t rows = codec->dim - 4 * i < 4 ? codec->dim - 4 * i : 4;
        for (int t = 0; t < TILE; t += LANES) {
            vf length = to_float(load_int(radius + t)) * load(spare + t), found[4];
            lookup_four(codec->table[0].data, codeword + t, found);
            for (int64_t j = 0; j < rows; j++) store(tile + (4 * i + j) * TILE + t, found[j] * length);
        }
    }
}
