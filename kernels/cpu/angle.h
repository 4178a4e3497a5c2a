/* angle: cosine and sine of a bin's center, times the pair's norm (formats/angle.py). */

enum { NORM_STORED, NORM_LINEAR, NORM_LOG };

/* The bins of pair `i`, and the codes of its norms if the codec codes norms. */
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

/* Tables of cosines and sines. With `bits`, they cover a quarter turn of 2^bits bins; the bits of a bin above choose the quarter. */
typedef struct {
    const float *cosines, *sines;
    int64_t entries;
    int32_t bits;
} Directions;

INLINE Directions directions_in(const Codec *codec) {
    return (Directions){codec->table[0].data, codec->table[1].data, codec->table[0].entries, (int32_t)codec->quarter_bits};
}

INLINE void directions_of(const Directions *from, vi bin, vf *cosine, vf *sine) {
    int32_t bits = from->bits;
#if LEVEL == 4
    if (bits == 4) {
        /* Two registers hold half a turn. */
        vf cosines = load(from->cosines), sines = load(from->sines);
        vi sign = bin << 26 & INT32_MIN;
        *cosine = (vf)((vi)_mm512_permutex2var_ps((__m512)cosines, (__m512i)bin, (__m512)-sines) ^ sign);
        *sine = (vf)((vi)_mm512_permutex2var_ps((__m512)sines, (__m512i)bin, (__m512)cosines) ^ sign);
        return;
    }
#endif
    vi at = bits ? bin & ((1 << bits) - 1) : bin;
    vf first = lookup(from->cosines, from->entries, at), second = lookup(from->sines, from->entries, at);
    if (bits) {
        vi swapped = bin << (31 - bits) >> 31, sign = bin << (30 - bits) & INT32_MIN;
        *cosine = (vf)((vi)choose(swapped, -second, first) ^ sign);
        *sine = (vf)((vi)choose(swapped, first, second) ^ sign);
        return;
    }
    *cosine = first;
    *sine = second;
}

INLINE void angle_pairs(Directions from, int64_t kind, const int32_t *bin, const int32_t *code, const float *numbers, float *pairs) {
    for (int t = 0; t < TILE; t += LANES) {
        vf cosine, sine, norm = load(numbers + t);
        directions_of(&from, load_int(bin + t), &cosine, &sine);
        if (kind != NORM_STORED) norm = load(numbers + TILE + t) + norm * to_float(load_int(code + t));
        if (kind == NORM_LOG) norm = power_of_two(norm);
        store(pairs + t, cosine * norm);
        store(pairs + TILE + t, sine * norm);
    }
}

static void angle_decode(const Codec *codec, const Loaded *in, float *tile) {
    int32_t bin[TILE], code[TILE];
    const float *numbers = in->numbers;
    int64_t kind = codec->norm_kind;
    Directions from = directions_in(codec);
    for (int64_t i = 0; 2 * i < codec->dim; i++, tile += 2 * TILE, numbers += kind == NORM_STORED ? TILE : 0) {
        pair_digits(codec, in, i, bin, code);
        /* Calls with tables that registers hold, of a quarter turn, as constants. */
        if (from.bits == 4)
            angle_pairs((Directions){from.cosines, from.sines, 16, 4}, kind, bin, code, numbers, tile);
        else if (LEVEL == 4 && from.bits == 5)
            angle_pairs((Directions){from.cosines, from.sines, 32, 5}, kind, bin, code, numbers, tile);
        else
            angle_pairs(from, kind, bin, code, numbers, tile);
    }
}
