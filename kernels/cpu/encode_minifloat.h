/* Encodes minifloat with scales per run and per block, row by row, bit for bit like formats/minifloat.py. */

/* The codes of the elements nearest to values, ties to even, with the sign of `from` as the top bit; larger values get the largest element. */
INLINE vi element_codes(vf x, vf from, int32_t bits, int32_t fraction, int32_t bias, int32_t finite) {
    vi sign = (vi)((vu)from >> (32 - bits)) & 1 << (bits - 1);
    vf size = magnitude_of(x);
    if (bits == 4) {
        /* Steps of 1/2, 1 and 2 apply from 0, 2 and 4 on. In its range, each of them gives the least of the three results. */
        size = smaller(size, splat(6));
        vi code = nearest_int(size * 2.f), second = nearest_int(size) + 2, third = nearest_int(size * .5f) + 4;
        return smaller_int(smaller_int(code, second), third) | sign;
    }
    vf smallest = (vf)splat_int((128 - bias) << 23);
    vi whole = (vi)size, spare = splat_int(23 - fraction);
    vi normal = (whole + ((whole >> spare) & 1) + ((1 << (22 - fraction)) - 1 - ((127 - bias) << 23))) >> spare;
    vi small = nearest_int(smaller(size, smallest) * (vf)splat_int((126 + bias + fraction) << 23));
    return smaller_int(choose_int(size < smallest, small, normal), splat_int(finite - 1)) | sign;
}

/* Number of rows whose blocks are measured together. */
enum { ROWS_MEASURED = 8, MAX_BLOCKS = 1024 / 16 * ROWS_MEASURED + LANES };

/* Returns the larger of two magnitudes in each lane, or in each half of a lane if values have 16 bits. */
INLINE vi larger_sizes(vi a, vi b, int wide) { return wide ? choose_int(a > b, a, b) : (vi)larger_word((vw)a, (vw)b); }

/* Computes the largest magnitude of each block of `count` rows, up to whole vectors. For 16-bit values, the result contains their bits in
   the upper halves of words. */
INLINE void block_maxima_of(const char *row, int64_t stride, int64_t count, int64_t row_bytes, float *most, int64_t block_bytes, int wide) {
    int64_t lanes = block_bytes / 4, of_block = lanes > LANES ? lanes / LANES : 1, left = count * row_bytes / (4 * LANES), at = 0;
    while (left > 0) {
        vi found[LANES];
        for (int64_t i = 0; i < LANES; i++) {
            vi own = splat_int(0);
            for (int64_t v = 0; v < of_block && left > 0; v++, left--) {
                own = larger_sizes(own, load_int((const int32_t *)(row + at)) & (wide ? 0x7fffffff : 0x7fff7fff), wide);
                at += 4 * LANES;
                if (at == row_bytes) at = 0, row += stride;
            }
            found[i] = own;
        }
        int64_t n = LANES;
        for (int64_t own = lanes > LANES ? LANES : lanes; own > 1; own /= 2, n /= 2)
            for (int64_t i = 0; i < n / 2; i++) {
                vi even = SHUFFLE(vi, vi, found[2 * i], found[2 * i + 1], EVEN), odd = SHUFFLE(vi, vi, found[2 * i], found[2 * i + 1], ODD);
                found[i] = larger_sizes(even, odd, wide);
            }
        for (int64_t i = 0; i < n; i++, most += LANES) store(most, (vf)(wide ? found[i] : larger_sizes(found[i], found[i] << 16, 0)));
    }
}

/* Does the same with numbers as results. Returns 0 if a value is not finite. */
static int block_maxima(const Encode *call, const char *rows, int64_t count, int64_t block, float *most) {
    int64_t dim = call->codec->dim, stride = call->x.row;
    if (call->dtype != F32)
        block == 16 ? block_maxima_of(rows, stride, count, 2 * dim, most, 32, 0) : block_maxima_of(rows, stride, count, 2 * dim, most, 64, 0);
    else
        block_maxima_of(rows, stride, count, 4 * dim, most, 4 * block, 1);
    vi good = splat_int(-1);
    for (int64_t b = 0; b < count * dim / block; b += LANES) {
        vf size = load(most + b);
        if (call->dtype != F32) size = value_of((vu)size, 1, call->dtype);
        good &= size < INFINITY;
        store(most + b, size);
    }
    return all_of(good);
}

/* The least bf16 numbers, as their bits, whose quotients by a block's scale round to 4-bit elements: to 1/2, 1, 3/2 and 2. From there on, the
   numbers double with the elements. */
typedef struct {
    int16_t word[4];
} Steps;

/* The scales that a code can stand for: what values are divided by, its reciprocal, and what else their codes depend on. A reciprocal of 0,
   for a scale of 0, makes every value 0. If all values of a run have one scale, its code is 0. */
typedef struct {
    float scale[256], reciprocal[256];
    Steps steps[256];
    /* For powers of two, half of the least number of a normal element, as bf16 in both halves. Below, elements are not normal. */
    int32_t base[256];
    /* The number of codes for which a product with the reciprocal may differ from the quotient: those from 1 on, if there are blocks. */
    int32_t inexact;
} Divisors;

/* Computes the steps of LANES codes from `code` on. */
INLINE void add_steps(Divisors *by, int64_t code) {
    /* Quotients up to 1/4 and 5/4 are rounded down, and those of 3/4 and 7/4 up. */
    static const float bound[4] = {.25f, .75f, 1.25f, 1.75f}, least[4] = {0x1.000002p-2f, .75f, 0x1.400002p0f, 1.75f};
    /* All values of a block whose scale is 0 are far below this scale. */
    vf reciprocal = load(by->reciprocal + code), scale = choose(reciprocal > 0.f, load(by->scale + code), splat(0x1p126f));
    ROLLED for (int step = 0; step < 4; step++) {
        int32_t words[LANES];
        vi near = (vi)(scale * bound[step]) >> 16;
        store_int(words, near - (short_quotient((vf)(near << 16), scale, reciprocal) < least[step]));
        ROLLED for (int i = 0; i < LANES; i++) by->steps[code + i].word[step] = (int16_t)words[i];
    }
}

/* Computes all scales of a run. */
static __attribute__((noinline)) AS_WRITTEN void make_divisors(const Encode *call, float run_scale, Divisors *by) {
    int32_t kind = (int32_t)call->codec->scale_kind, bits = (int32_t)call->codec->packing[0].digit[0].bits;
    int32_t bias = bits == 4 ? 1 : (int32_t)call->codec->bias, codes = kind == POWERS_OF_BLOCKS ? 256 : kind == ONE_SCALE ? LANES : 128;
    by->inexact = 0;
    for (int32_t c = 0; c < codes; c += LANES) {
        int32_t codes_here[LANES];
        ROLLED for (int32_t i = 0; i < LANES; i++) codes_here[i] = c + i;
        vi code = load_int(codes_here);
        if (kind == POWERS_OF_BLOCKS) {
            vi base = choose_int(code > bias, (code - bias) << 7, splat_int(0x7fff));
            store(by->reciprocal + c, (vf)((254 - code) << 23));
            store_int(by->base + c, (base & 0xffff) | base << 16);
            continue;
        }
        vf scale = kind == ONE_SCALE ? splat(run_scale) : from_element(code, 8, 3, 7, 0x7f) * run_scale;
        vf divisor = choose(scale > 0.f, scale, splat(1));
        store(by->scale + c, divisor);
        store(by->reciprocal + c, choose(scale > 0.f, 1.f / divisor, splat(0)));
        ROLLED for (int32_t i = c; i < c + LANES && i < 0x7f; i++)
            by->inexact += by->scale[i] < 0x1p-80f || (kind == SCALES_OF_BLOCKS && i && by->reciprocal[i] == 0);
        if (kind == SCALES_OF_BLOCKS && call->dtype == BF16) add_steps(by, c);
    }
}

/* Computes the codes of the blocks' scales. Returns 0 if some values must be divided. */
static int block_scales(const Encode *call, const float *most, int64_t blocks, float run_scale, uint8_t *code, const Divisors *by) {
    int32_t fraction = (int32_t)call->codec->fraction_bits, emax = fraction == 3 ? 8 : fraction == 2 ? 15 : 2;
    /* Corresponds to exponent_carry in formats/minifloat.py. */
    int32_t last = ((int32_t)call->codec->finite - 1) & ((1 << fraction) - 1), carry = (1 << 23) - ((2 * last + 1) << (22 - fraction)) - 1;
    vi small = splat_int(0);
    for (int64_t b = 0; b < blocks; b += LANES) {
        vf largest = load(most + b);
        vi own;
        if (call->codec->scale_kind == POWERS_OF_BLOCKS) {
            own = (((vi)largest + carry) >> 23) - emax;
            own = choose_int(own > 0, own, splat_int(0));
        } else {
            vf divisor = splat(run_scale > 0 ? run_scale : INFINITY);
            own = element_codes(largest / 6.f / divisor, largest, 8, 3, 7, 0x7f);
            small |= (own > 0) & (own <= by->inexact);
        }
        store_octets(code + b, own);
    }
    return all_of(~small);
}

/* How values are scaled: by a power of two, or divided, as bf16 in 16-bit lanes or as binary32. */
enum { BY_POWERS, BY_RECIPROCALS, BY_DIVISION };

/* How bf16 values that are divided by one number map to elements: within a binade by a table, which is that of all binades for values from
   `smallest` on. */
typedef struct {
    Staircase codes;
    int32_t exponent, smallest;
} Binades;

static void make_binades(const Codec *codec, const Divisors *by, Binades *out) {
    int32_t fraction = (int32_t)codec->fraction_bits, bias = (int32_t)codec->bias, finite = (int32_t)codec->finite;
    uint16_t codes[128];
    uint32_t scale;
    memcpy(&scale, by->scale, sizeof scale);
    out->exponent = (int32_t)(scale >> 23);
    for (int32_t i = 0; i < 128; i += LANES) {
        vi lane = splat_int(i);
        for (int32_t l = 0; l < LANES; l++) lane[l] += l;
        vf x = (vf)((lane + (out->exponent << 7)) << 16);
        vf quotient = short_quotient(x, splat(by->scale[0]), splat(by->reciprocal[0]));
        store_words(codes + i, element_codes(quotient, x, 8, fraction, bias, finite));
    }
    make_staircase(codes, &out->codes);
    /* The least bf16 number whose quotient is a normal element. A scale of 0 has none. */
    int32_t least = (int32_t)((scale + 0xffff) >> 16) + 128 * (1 - bias);
    out->smallest = by->reciprocal[0] > 0 ? least : INT16_MAX;
}

/* The codes of bf16 values, some of which are not normal elements. */
static __attribute__((noinline)) vw small_word_codes(const Codec *codec, vw x, float scale, float reciprocal, int32_t bits) {
    int32_t fraction = (int32_t)codec->fraction_bits, bias = (int32_t)codec->bias, finite = (int32_t)codec->finite;
    uint16_t words[2 * LANES];
    store_word_pairs(words, x);
    for (int64_t i = 0; i < 2 * LANES; i += LANES) {
        vf from = (vf)(load_words(words + i) << 16);
        vf size = scale > 0 ? short_quotient(from, splat(scale), splat(reciprocal)) : from * reciprocal;
        store_words(words + i, element_codes(size, from, bits, fraction, bias, finite));
    }
    return load_word_pairs(words);
}

/* Codes of 2 * LANES bf16 values that are divided by one number. */
INLINE vw binade_codes(const Codec *codec, vw x, const Divisors *by, const Binades *binades) {
    vw size = x & 0x7fff;
    if (any_word_below(size, splat_word(binades->smallest))) return small_word_codes(codec, x, by->scale[0], by->reciprocal[0], 8);
    int16_t fraction = (int16_t)codec->fraction_bits, exponent = (int16_t)binades->exponent;
    vw code = on_staircase(&binades->codes, size) + (((size >> 7) - exponent) << fraction);
    return smaller_word(code, splat_word((int32_t)codec->finite - 1)) | ((x >> 8) & 128);
}

/* Codes of 2 * LANES bf16 values whose scale is a power of two. */
INLINE vw power_codes(const Codec *codec, vw x, const Divisors *by, uint8_t code, int32_t bits) {
    int32_t fraction = bits == 4 ? 1 : (int32_t)codec->fraction_bits;
    /* From 128 on, elements are normal. */
    vw size = (x & 0x7fff) - (vw)splat_int(by->base[code]);
    /* Elements of 4 bits below 1 are 0 and 1/2, which two comparisons find. */
    if (bits == 4 ? code < 3 : any_word_below(size, splat_word(128))) return small_word_codes(codec, x, 0, by->reciprocal[code], bits);
    int16_t shift = (int16_t)(7 - fraction), round = (int16_t)((1 << (shift - 1)) - 1);
    vw result = (size + ((size >> shift) & 1) + round) >> shift;
    if (bits == 4) result = larger_word(result, -(vw)(size > -128) - (vw)(size >= 64));
    return smaller_word(result, splat_word((int32_t)codec->finite - 1)) | ((x >> (int16_t)(16 - bits)) & (int16_t)(1 << (bits - 1)));
}

/* Codes of 4 bits of 2 * LANES bf16 values in blocks of 16, the first of which has the scale `code`. */
INLINE vw step_codes(vw x, const Divisors *by, const uint8_t *code) {
    vw half, one, more, two;
    split_blocks(&by->steps[code[0]], &by->steps[code[LANES > 8]], &half, &one, &more, &two);
    vw size = x & 0x7fff, far = size - more;
    vw result = ((far >> 6) & -2) + 3 - (vw)((far & 127) >= two - more);
    vw small = -(vw)(size >= half) - (vw)(size >= one);
    return smaller_word(larger_word(result, small), splat_word(7)) | ((x >> 12) & 8);
}

/* Computes the codes of rows of bf16 like row_codes, but with 16 bits for each value. If rows of words are `folded`, half as wide as
   vectors, each vector has two fields of them. */
INLINE void word_codes(const Codec *codec, const char *row, int64_t stride, int64_t count, uint16_t *to, int64_t to_stride,
                       const Divisors *by, const Binades *binades, const uint8_t *codes, int way, int32_t bits, int folded) {
    int64_t width = codec->packing[0].width, step = folded ? LANES : width, block = way == BY_POWERS ? 32 : 16;
    for (int64_t i = 0; i < count; i++, row += stride, to += to_stride, codes += codec->dim / block)
        for (int64_t c = 0; c < width; c += 2 * LANES) {
            vw word = splat_word(0);
            for (int32_t f = 0; f < 16 / bits; f += 1 + folded) {
                int64_t d = f * step + c;
                vw x = load_word_pairs(row + 2 * d), code;
                if (way == BY_POWERS)
                    code = power_codes(codec, x, by, codes[d / block], bits);
                else if (bits == 4)
                    code = step_codes(x, by, codes + d / block);
                else
                    code = binade_codes(codec, x, by, binades);
                word |= code << (int16_t)(bits * f);
            }
            if (folded) {
                uint16_t halves[3 * LANES];
                store_word_pairs(halves, word);
                word |= load_word_pairs(halves + LANES) << (int16_t)bits;
                memcpy(to, &word, sizeof word / 2);
            } else
                store_word_pairs(to + c, word);
        }
}

/* Computes the codes of `count` rows of binary32. Their blocks of 1 << `shift` channels (or all values) have the scales of `codes`. */
INLINE void row_codes(const Codec *codec, const char *row, int64_t stride, int64_t count, uint16_t *to, int64_t to_stride, const Divisors *by,
                      const uint8_t *codes, int32_t shift, int way, int64_t bits) {
    int32_t fraction = (int32_t)codec->fraction_bits, bias = (int32_t)codec->bias, finite = (int32_t)codec->finite;
    int64_t width = codec->packing[0].width, first = 0;
    for (int64_t i = 0; i < count; i++, row += stride, to += to_stride, first += codec->dim >> shift)
        for (int64_t c = 0; c < width; c += LANES) {
            vi word = splat_int(0);
            for (int64_t f = 0; f < 16 / bits; f++) {
                int64_t d = f * width + c, b = codes[first + (d >> shift)];
                vf from = load((const float *)row + d), x = from;
                if (way == BY_POWERS)
                    x *= by->reciprocal[b];
                else
                    x = x / by->scale[b] * (by->reciprocal[b] > 0 ? 1.f : 0.f);
                word |= element_codes(x, from, (int32_t)bits, fraction, bias, finite) << (int32_t)(bits * f);
            }
            store_words(to + c, word);
        }
}

/* Returns the first token in [t, stop) that is skipped, or stop. */
static int64_t next_skipped(const Encode *call, int64_t batch, int64_t t, int64_t stop) {
    while (t < stop && !(call->skipped && call->skipped[batch * call->tokens + t])) t++;
    return t;
}

/* Rows of numbers in bf16 or binary32. */
typedef struct {
    const char *row;
    int64_t stride, count, dtype;
} LongRows;

/* Returns 1 if rows have 16 words of 4-bit codes, half as many as vectors. */
static int is_folded(const Codec *codec) {
    return LANES == 16 && codec->packing[0].width == LANES && codec->packing[0].digit[0].bits == 4;
}

/* Returns 1 if bf16 values scaled in this way are encoded by word_codes. */
static int uses_words(const Codec *codec, int way) {
    int64_t width = codec->packing[0].width, bits = codec->packing[0].digit[0].bits;
    int words = way == BY_POWERS || (way == BY_RECIPROCALS && codec->scale_kind == (bits == 8 ? ONE_SCALE : SCALES_OF_BLOCKS));
    return words && (width % (2 * LANES) == 0 || is_folded(codec));
}

/* Returns the rows unchanged, or widened to binary32 in `wide`: binary16 rows, and bf16 rows whose values are divided or too few. */
static LongRows long_rows(const Encode *call, const char *row, int64_t count, int way, float *wide) {
    int64_t dim = call->codec->dim, stride = call->x.row;
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < 2 * dim; d += CACHE_LINE) __builtin_prefetch(row + (ROWS_MEASURED + i) * stride + d, 0, 2);
    if (call->dtype == F32 || (call->dtype == BF16 && uses_words(call->codec, way))) return (LongRows){row, stride, count, call->dtype};
    for (int64_t i = 0; i < count; i++, row += stride)
        for (int64_t d = 0; d < dim; d += LANES) store(wide + i * dim + d, call->dtype == BF16 ? widened(row, d, BF16) : widened(row, d, F16));
    return (LongRows){(const char *)wide, dim * (int64_t)sizeof(float), count, F32};
}

/* Encodes rows, with the kind of scaling, the number of bits and the layout as constants. */
#define ROW_CODES(way, bits)                                                                         \
    row_codes(codec, rows.row, rows.stride, rows.count, to, to_stride, by, codes, shift, way, bits); \
    break
#define WORD_CODES(way, bits, folded)                                                                           \
    word_codes(codec, rows.row, rows.stride, rows.count, to, to_stride, by, binades, codes, way, bits, folded); \
    break

static void all_row_codes(const Codec *codec, LongRows rows, uint16_t *to, int64_t to_stride, const Divisors *by, const Binades *binades,
                          const uint8_t *codes, int way) {
    int64_t bits = codec->packing[0].digit[0].bits;
    int32_t shift = codec->scale_kind == ONE_SCALE ? 31 : __builtin_ctz((unsigned)codec->size);
    switch (8 * way + 4 * (rows.dtype == F32) + 2 * is_folded(codec) + (bits == 4)) {
        case 8 * BY_POWERS: WORD_CODES(BY_POWERS, 8, 0);
        case 8 * BY_POWERS + 1: WORD_CODES(BY_POWERS, 4, 0);
        case 8 * BY_POWERS + 3: WORD_CODES(BY_POWERS, 4, 1);
        case 8 * BY_RECIPROCALS: WORD_CODES(BY_RECIPROCALS, 8, 0);
        case 8 * BY_RECIPROCALS + 1: WORD_CODES(BY_RECIPROCALS, 4, 0);
        case 8 * BY_RECIPROCALS + 3: WORD_CODES(BY_RECIPROCALS, 4, 1);
        case 8 * BY_POWERS + 4: ROW_CODES(BY_POWERS, 8);
        case 8 * BY_POWERS + 5:
        case 8 * BY_POWERS + 7: ROW_CODES(BY_POWERS, 4);
        case 8 * BY_DIVISION + 4: ROW_CODES(BY_DIVISION, 8);
        default: ROW_CODES(BY_DIVISION, 4);
    }
}

/* Encodes tokens [start, stop) of one head with the scale of their run; returns 0 if formats/ must reject a value. */
static int encode_minifloats(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t stop) {
    const Codec *codec = call->codec;
    const Stream *codes = call->streams, *scales = call->streams + 1;
    int64_t kind = codec->scale_kind, blocks = kind == ONE_SCALE ? 0 : codec->dim / codec->size;
    float run_scale = kind == POWERS_OF_BLOCKS ? 1 : *(const float *)row_of(scales + (kind == SCALES_OF_BLOCKS), batch, head, 0);
    float most[MAX_BLOCKS], wide[ROWS_MEASURED * 1024];
    uint8_t code[MAX_BLOCKS] = {0};
    Divisors by;
    Binades binades;
    make_divisors(call, run_scale, &by);
    int quick = !by.inexact;
    if (quick && kind == ONE_SCALE && uses_words(codec, BY_RECIPROCALS)) make_binades(codec, &by, &binades);
    for (int64_t t = start, count; t < stop; t += count) {
        count = next_skipped(call, batch, t, t + ROWS_MEASURED < stop ? t + ROWS_MEASURED : stop) - t;
        if (count == 0) {
            memset((char *)row_of(codes, batch, head, t), 0, 2 * codec->packing[0].width);
            if (blocks) memset((char *)row_of(scales, batch, head, t), 0, blocks);
            count = 1;
            continue;
        }
        const char *rows = row_of(&call->x, batch, head, t);
        if (blocks) {
            if (!block_maxima(call, rows, count, codec->size, most)) return 0;
            quick = block_scales(call, most, count * blocks, run_scale, code, &by);
            int64_t together = scales->row == blocks ? count : 1;
            for (int64_t i = 0; i < count; i += together) memcpy((char *)row_of(scales, batch, head, t + i), code + i * blocks, together * blocks);
        }
        int words = quick && call->dtype == BF16 && uses_words(codec, BY_RECIPROCALS);
        int way = kind == POWERS_OF_BLOCKS ? BY_POWERS : words ? BY_RECIPROCALS : BY_DIVISION;
        uint16_t *to = (uint16_t *)row_of(codes, batch, head, t);
        all_row_codes(codec, long_rows(call, rows, count, way, wide), to, codes->row / 2, &by, &binades, code, way);
    }
    return 1;
}
