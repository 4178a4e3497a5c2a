/* angle: cosine and sine of a bin's center, times the pair's norm (formats/angle.py). */

enum { NORM_STORED, NORM_LINEAR, NORM_LOG };

/* The bins of pair `i`, and the codes of its norms if norms are coded. */
static void pair_digits(const Codec *codec, const Loaded *in, int64_t i, int32_t *bin, int32_t *code) {
    const Packing *packing = codec->packing;
    digits_of(packing, in->words, 0, i, bin);
    if (codec->direct) {
        digits_of(packing, in->words, 1, i, code);
        return;
    }
    if (codec->factored) {
        digits_of(&packing[1], packing_words(codec, in, 1), 0, i, code);
        for (int t = 0; t < TILE; t += LANES) store_int(bin + t, load_int(bin + t) + load_int(code + t) * (int32_t)packing[0].digit[0].base);
    }
    int64_t last = codec->packings - 1;
    if (codec->norm_kind != NORM_STORED) digits_of(&packing[last], packing_words(codec, in, last), 0, i, code);
}

/* Cosine and sine of bins. With `quarter_bits`, tables cover a quarter turn of 2^quarter_bits bins; the bits above choose the quarter. */
INLINE void directions_of(const Codec *codec, vi bin, vf *cosine, vf *sine) {
    int32_t bits = (int32_t)codec->quarter_bits;
    vi at = bits ? bin & ((1 << bits) - 1) : bin;
    vf first = lookup(codec->table[0].data, codec->table[0].entries, at), second = lookup(codec->table[1].data, codec->table[1].entries, at);
    if (bits) {
        vi quarter = bin >> bits, swapped = -(quarter & 1);
        vf changed = (vf)(((vi)first ^ (vi)second) & swapped);
        first = (vf)((vi)first ^ (vi)changed ^ ((quarter + 1) & 2) << 30);
        second = (vf)((vi)second ^ (vi)changed ^ (quarter & 2) << 30);
    }
    *cosine = first;
    *sine = second;
}

static void angle_decode(const Codec *codec, const Loaded *in, float *tile) {
    int32_t bin[TILE], code[TILE];
    for (int64_t i = 0; 2 * i < codec->dim; i++) {
        pair_digits(codec, in, i, bin, code);
        for (int t = 0; t < TILE; t += LANES) {
            vf cosine, sine, norm;
            directions_of(codec, load_int(bin + t), &cosine, &sine);
            if (codec->norm_kind == NORM_STORED)
                norm = load(in->numbers + i * TILE + t);
            else {
                norm = load(in->numbers + TILE + t) + load(in->numbers + t) * to_float(load_int(code + t));
                if (codec->norm_kind == NORM_LOG) norm = power_of_two(norm);
            }
            store(tile + 2 * i * TILE + t, cosine * norm);
            store(tile + (2 * i + 1) * TILE + t, sine * norm);
        }
    }
}
