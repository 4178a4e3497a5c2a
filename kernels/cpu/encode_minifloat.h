/* Encodes minifloat with scales per run and per block, row by row, bit for bit like formats/minifloat.py. */

/* The codes of the elements nearest to values, ties to even, with the sign as the top bit; larger values get the largest element. */
static inline vi element_codes(vf x, int32_t bits, int32_t fraction, int32_t bias, int32_t finite) {
    vi sign = (vi)((vu)x >> 31) << (bits - 1);
    vf size = magnitude_of(x);
    if (bits == 4) {
        /* Steps of 1/2, 1 and 2, from 0, 2 and 4 on: each is the least of the three where it holds. */
        size = smaller(size, splat(6));
        vi code = nearest_int(size * 2.f), second = nearest_int(size) + 2, third = nearest_int(size * .5f) + 4;
        code = choose_int(second < code, second, code);
        return choose_int(third < code, third, code) | sign;
    }
    vf smallest = (vf)splat_int((128 - bias) << 23);
    vi whole = (vi)size, spare = splat_int(23 - fraction);
    vi normal = ((whole + ((whole >> spare) & 1) + ((1 << (22 - fraction)) - 1)) >> spare) - ((127 - bias) << fraction);
    vi small = nearest_int(smaller(size, smallest) * (vf)splat_int((126 + bias + fraction) << 23));
    vi code = choose_int(size < smallest, small, normal);
    return choose_int(code < finite, code, splat_int(finite - 1)) | sign;
}

/* The largest magnitudes of a row's blocks, up to whole vectors; 0 for a value that is not finite. */
static inline int block_maxima(const char *row, int64_t dim, int64_t block, float *most, int64_t dtype) {
    vi good = splat_int(-1);
    for (int64_t first = 0; first < dim / block; first += LANES) {
        vf found[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            found[i] = splat(0);
            for (int64_t d = (first + i) * block; d < (first + i + 1) * block && d < dim; d += LANES) {
                vf size = magnitude_of(widened(row, d, dtype));
                good &= size < INFINITY;
                found[i] = larger(found[i], size);
            }
        }
        store(most + first, maxima_of(found));
    }
    return all_of(good);
}

enum { MAX_BLOCKS = 1024 / 16 + 16 };

/* The codes of the scales of a row's blocks, and what its values are multiplied by (powers of two), or divided by. */
static inline void block_scales(const Encode *call, const float *most, int64_t blocks, float run_scale, uint8_t *to, float *factors) {
    int32_t code[MAX_BLOCKS], fraction = (int32_t)call->codec->fraction_bits, emax = fraction == 3 ? 8 : fraction == 2 ? 15 : 2;
    /* formats/minifloat.py, exponent_carry. */
    int32_t last = ((int32_t)call->codec->finite - 1) & ((1 << fraction) - 1), carry = (1 << 23) - ((2 * last + 1) << (22 - fraction)) - 1;
    for (int64_t b = 0; b < blocks; b += LANES) {
        vf largest = load(most + b);
        vi own;
        if (call->codec->scale_kind == POWERS_OF_BLOCKS) {
            own = (((vi)largest + carry) >> 23) - emax;
            own = choose_int(own > 0, own, splat_int(0));
            store(factors + b, (vf)((254 - own) << 23));
        } else {
            vf divisor = splat(run_scale > 0 ? run_scale : INFINITY);
            own = element_codes(largest / 6.f / divisor, 8, 3, 7, 0x7f);
            vf scale = from_element(own, 8, 3, 7, 0x7f) * run_scale;
            store(factors + b, choose(scale > 0.f, scale, splat(INFINITY)));
        }
        store_int(code + b, own);
    }
    for (int64_t b = 0; b < blocks; b++) to[b] = (uint8_t)code[b];
}

static inline int minifloat_rows_of(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t stop, int64_t bits,
                                    int64_t kind, int64_t dtype) {
    const Codec *codec = call->codec;
    const Packing *packing = &codec->packing[0];
    int32_t fraction = (int32_t)codec->fraction_bits, bias = (int32_t)codec->bias, finite = (int32_t)codec->finite;
    int64_t width = packing->width, block = kind == ONE_SCALE ? codec->dim : codec->size;
    float run_scale = 0, factors[MAX_BLOCKS], most[MAX_BLOCKS];
    if (kind == ONE_SCALE)
        run_scale = *(const float *)row_of(call->streams + 1, batch, head, 0);
    else if (kind == SCALES_OF_BLOCKS)
        run_scale = *(const float *)row_of(call->streams + 2, batch, head, 0);
    vf divisor = splat(run_scale > 0 ? run_scale : INFINITY);
    for (int64_t t = start; t < stop; t++) {
        const char *row = row_of(&call->x, batch, head, t);
        uint16_t *to = (uint16_t *)row_of(call->streams, batch, head, t);
        for (int64_t i = 0; i < codec->dim * (dtype == F32 ? 4 : 2); i += CACHE_LINE) __builtin_prefetch(row + 8 * call->x.row + i, 0, 2);
        if (kind != ONE_SCALE) {
            if (!block_maxima(row, codec->dim, block, most, dtype)) return 0;
            block_scales(call, most, codec->dim / block, run_scale, (uint8_t *)row_of(call->streams + 1, batch, head, t), factors);
        }
        for (int64_t c = 0; c < width; c += LANES) {
            vi word = splat_int(0);
            for (int64_t f = 0; f < 16 / bits; f++) {
                int64_t d = f * width + c;
                vf x = widened(row, d, dtype);
                x = kind == ONE_SCALE ? x / divisor : kind == POWERS_OF_BLOCKS ? x * factors[d / block] : x / factors[d / block];
                word |= element_codes(x, (int32_t)bits, fraction, bias, finite) << (int32_t)(bits * f);
            }
            store_words(to + c, word);
        }
    }
    return 1;
}

#define BY_ELEMENT(dtype)                                                                                                \
    (bits == 4 ? kind == ONE_SCALE          ? minifloat_rows_of(call, batch, head, start, stop, 4, ONE_SCALE, dtype)        \
                 : kind == POWERS_OF_BLOCKS ? minifloat_rows_of(call, batch, head, start, stop, 4, POWERS_OF_BLOCKS, dtype) \
                                            : minifloat_rows_of(call, batch, head, start, stop, 4, SCALES_OF_BLOCKS, dtype) \
     : kind == ONE_SCALE ? minifloat_rows_of(call, batch, head, start, stop, 8, ONE_SCALE, dtype)                           \
                         : minifloat_rows_of(call, batch, head, start, stop, 8, POWERS_OF_BLOCKS, dtype))

/* Encodes tokens [start, stop) of one head with the scale of their run; returns 0 if formats/ must reject a value. */
static int encode_minifloats(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t stop) {
    int64_t bits = call->codec->packing[0].digit[0].bits, kind = call->codec->scale_kind;
    switch (call->dtype) {
        case F16: return BY_ELEMENT(F16);
        case BF16: return BY_ELEMENT(BF16);
        default: return BY_ELEMENT(F32);
    }
}
