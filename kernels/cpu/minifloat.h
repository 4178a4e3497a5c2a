/* minifloat: floats of 8 or 4 bits, times the scale of their run, token or block (formats/minifloat.py). */

enum { ONE_SCALE, POWERS_OF_BLOCKS, SCALES_OF_BLOCKS };

/* A float of a sign, an exponent of the given bias and `fraction` bits; 0 for NaN and infinity, magnitudes from `finite` on. */
INLINE vf from_element(vi code, int32_t bits, int32_t fraction, int32_t bias, int32_t finite) {
    vi size = code & ((1 << (bits - 1)) - 1), sign = code >> (bits - 1) << 31;
    vf magnitude = (vf)(size << (23 - fraction)) * (vf)splat_int((254 - bias) << 23);
    return (vf)(((vi)magnitude | sign) & (size < finite));
}

static void minifloat_decode(const Codec *codec, const Loaded *in, float *tile) {
    int32_t code[TILE], bits = (int32_t)codec->packing[0].digit[0].bits;
    int32_t fraction = (int32_t)codec->fraction_bits, bias = (int32_t)codec->bias, finite = (int32_t)codec->finite;
    for (int64_t d = 0; d < codec->dim; d++) {
        digits_of(&codec->packing[0], in->words, 0, d, code);
        for (int t = 0; t < TILE; t += LANES) {
            vf x = from_element(load_int(code + t), bits, fraction, bias, finite), scale = load(in->numbers + t);
            if (codec->scale_kind != ONE_SCALE) {
                vi stored = to_int(load(in->numbers + d / codec->size * TILE + t)), half_exponent = stored >> 1;
                if (codec->scale_kind == POWERS_OF_BLOCKS) {
                    /* 2^(code - 127) as two normal numbers. */
                    x *= (vf)((half_exponent + 64) << 23);
                    scale = (vf)((stored - half_exponent + 63) << 23);
                } else {
                    x *= from_element(stored, 8, 3, 7, 0x7f);
                    scale = load(in->numbers + (codec->dim + codec->size - 1) / codec->size * TILE + t);
                }
            }
            store(tile + d * TILE + t, x * scale);
        }
    }
}
