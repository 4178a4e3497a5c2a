/* octahedral: a direction of the first quarter square with two signs, times a triplet's norm and the token's (formats/octahedral.py). */

enum { DIRECTION_X, DIRECTION_Y, DIRECTION_Z, TRIPLET_NORM, DIRECTIONS_BY_FOUR };

/* The index and sign digits of triplet `i`; the norm's bits are above one of them. */
static void triplet_digits(const Codec *codec, const Loaded *in, int64_t i, int32_t *index, int32_t *sign) {
    const Packing *packing = &codec->packing[0];
    if (!codec->direct) {
        memset(index, 0, sizeof(int32_t) * TILE);
        if (codec->packings == 2) digits_of(packing, in->words, 0, i, index);
        digits_of(&codec->packing[codec->packings - 1], packing_words(codec, in, codec->packings - 1), 0, i, sign);
    } else if (packing->digits == 2) {
        digits_of(packing, in->words, 0, i, index);
        digits_of(packing, in->words, 1, i, sign);
    } else {
        int32_t both[TILE];
        digits_of(packing, in->words, 0, i, both);
        for (int t = 0; t < TILE; t += LANES) {
            vi x = load_int(both + t);
            store_int(index + t, x & ((1 << codec->digit_bits) - 1));
            store_int(sign + t, x >> (int32_t)codec->digit_bits);
        }
    }
}

static void octahedral_decode(const Codec *codec, const Loaded *in, float *tile) {
    int32_t index[TILE], sign[TILE], direction[TILE];
    int32_t bits = (int32_t)codec->index_bits, mask = (1 << bits) - 1;
    const Table *axis = codec->table, *norms = &codec->table[TRIPLET_NORM];
    int few = axis->entries <= MAX_IN_REGISTERS;
    for (int64_t i = 0; 3 * i < codec->dim; i++) {
        triplet_digits(codec, in, i, index, sign);
        if (!few)
            for (int t = 0; t < TILE; t += LANES) store_int(direction + t, (load_int(index + t) & mask) << 2);
        float *row = tile + 3 * i * TILE;
        for (int t = 0; t < TILE; t += LANES) {
            vi own = load_int(index + t), signs = load_int(sign + t), at = own & mask;
            vf norm = lookup(norms->data, norms->entries, codec->norm_with_index ? own >> bits : signs >> 2), whole = load(in->numbers + t);
            vf found[4];
            if (!few) lookup_four(codec->table[DIRECTIONS_BY_FOUR].data, direction + t, found);
            for (int64_t j = 0; j < 3 && 3 * i + j < codec->dim; j++) {
                vf x = few ? lookup(axis[j].data, axis->entries, at) : found[j];
                if (j < 2) x = (vf)((vi)x ^ (signs >> (int32_t)j & 1) << 31);
                store(row + j * TILE + t, x * norm * whole);
            }
        }
    }
}
