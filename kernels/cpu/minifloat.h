/* minifloat: floats of 8 or 4 bits, times the scale of their run, token or block (formats/minifloat.py). */

enum { ONE_SCALE, POWERS_OF_BLOCKS, SCALES_OF_BLOCKS };

/* Converts a float that consists of a sign, an exponent with the given bias, and `fraction` bits. NaN and infinity, which are the
   magnitudes from `finite` on, become 0. */
INLINE vf from_element(vi code, int32_t bits, int32_t fraction, int32_t bias, int32_t finite) {
    vi size = code & ((1 << (bits - 1)) - 1), sign = code >> (bits - 1) << 31;
    vf magnitude = (vf)(size << (23 - fraction)) * (vf)splat_int((254 - bias) << 23);
    return (vf)(((vi)magnitude | sign) & (size < finite));
}

/* The two factors of the blocks' values, [TILE] each. Values are multiplied by one after the other. */
static void minifloat_factors(const Codec *codec, const Loaded *in, int64_t block, float *factors) {
    const float *stored = in->numbers + block * TILE, *whole = in->numbers + (codec->dim + codec->size - 1) / codec->size * TILE;
    for (int t = 0; t < TILE; t += LANES) {
        vi code = to_int(load(stored + t)), half_exponent = code >> 1;
        if (codec->scale_kind == POWERS_OF_BLOCKS) {
            /* Returns 2^(code - 127) as the product of two normal numbers. */
            store(factors + t, (vf)((half_exponent + 64) << 23));
            store(factors + TILE + t, (vf)((code - half_exponent + 63) << 23));
        } else {
            store(factors + t, from_element(code, 8, 3, 7, 0x7f));
            store(factors + TILE + t, load(whole + t));
        }
    }
}

/* The codes of all 4-bit elements. */
static const int32_t sixteen[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

static void minifloat_decode(const Codec *codec, const Loaded *in, float *tile) {
    int32_t code[TILE], bits = (int32_t)codec->packing[0].digit[0].bits;
    int32_t fraction = (int32_t)codec->fraction_bits, bias = (int32_t)codec->bias, finite = (int32_t)codec->finite;
    int64_t block = codec->scale_kind == ONE_SCALE ? codec->dim : codec->size;
    float factors[2 * TILE] = {0}, element[16] = {0};
    for (int32_t c = 0; bits == 4 && c < 16; c += LANES) store(element + c, from_element(load_int(sixteen + c), bits, fraction, bias, finite));
    for (int64_t d = 0; d < codec->dim; d++) {
        if (codec->scale_kind != ONE_SCALE && d % block == 0) minifloat_factors(codec, in, d / block, factors);
        digits_of(&codec->packing[0], in->words, 0, d, code);
        for (int t = 0; t < TILE; t += LANES) {
            vi own = load_int(code + t);
            vf x = bits == 4 ? lookup(element, 16, own) : from_element(own, bits, fraction, bias, finite);
            x = codec->scale_kind == ONE_SCALE ? x * load(in->numbers + t) : x * load(factors + t) * load(factors + TILE + t);
            store(tile + d * TILE + t, x);
        }
    }
}
