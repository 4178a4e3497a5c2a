/* Encoding of scalar: the nearest magnitude and a sign per channel of the unit vector (formats/scalar.py). */

static void scalar_encode(const Encode *call, const Encoded *out) {
    const Codec *codec = call->codec;
    const int32_t *channel = codec->channels;
    int32_t code[HALF_TILE];
    float product[HALF_TILE] = {0}, squares[HALF_TILE] = {0}, per_norm[HALF_TILE];
    for (int64_t t = 0; t < out->tokens; t += LANES) store(per_norm + t, 1.f / larger(load(out->norm + t), splat(0x1p-126f)));
    for (int64_t part = 0; part < codec->packings; part++) {
        const Packing *packing = &codec->packing[part];
        const Table *table = &codec->table[part];
        int32_t magnitudes = (int32_t)packing->digit[0].base / 2;
        uint16_t *words = out->words + columns_before(codec, part) * HALF_TILE;
        for (int64_t i = 0; i < packing->symbols; i++) {
            const float *row = out->tile + *channel++ * HALF_TILE;
            for (int64_t t = 0; t < out->tokens; t += LANES) {
                vf x = load(row + t) * load(per_norm + t);
                vi symbol = add_above(splat(0), x, level_of(&call->bounds[part], magnitudes, magnitude_of(x)), magnitudes);
                vf decoded = lookup(table->data, table->entries, symbol);
                store_int(code + t, symbol);
                store(product + t, load(product + t) + x * decoded);
                store(squares + t, load(squares + t) + decoded * decoded);
            }
            add_digit(out, packing, words, 0, i, code);
        }
    }
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        vf norm = load(out->norm + t);
        if (call->unbiased) norm = unbiased_factor(norm, load(product + t), load(squares + t), splat(1), codec->values[0].dtype);
        store(out->numbers + t, norm);
    }
}
