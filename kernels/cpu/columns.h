/* Converts one tile of digits and numbers to streams: the reverse of words.h. */

/* One tile before and after encoding: rows of HALF_TILE tokens. The first `tokens` of them, rounded up to whole vectors, are encoded. */
typedef struct {
    int64_t tokens;
    float *tile;     /* [dim, and three rows of zeros][HALF_TILE] in the coded frame */
    float *norm;     /* [HALF_TILE] */
    float *errors;   /* [HALF_TILE], relative to the norms */
    uint16_t *words; /* as in Loaded */
    float *numbers;  /* as in Loaded */
    float *spare;    /* two tiles */
    void *space;     /* trellis: search_bytes */
} Encoded;

/* The position of a digit whose base is a power of two: the words at `low`, from bit `shift` on. If the digit straddles two planes, the
   rest is in the words of the next plane. */
typedef struct {
    uint16_t *low;
    int64_t plane;
    int32_t shift, straddles;
} Place;

INLINE Place place_of(const Packing *packing, uint16_t *words, int64_t digit, int64_t symbol) {
    int64_t field = symbol / packing->width, plane = packing->width * HALF_TILE, bits = packing->digit[digit].bits;
    int64_t at = packing->digit[digit].place + field * bits;
    return (Place){words + symbol % packing->width * HALF_TILE + at / 16 * plane, plane, at % 16, at % 16 + bits > 16};
}

/* Adds the digits of LANES tokens, beginning with token `t`. */
INLINE void put_digit(const Place *place, int64_t t, vi code) {
    uint16_t *low = place->low + t, *high = low + place->plane;
    code <<= place->shift;
    store_words(low, load_words(low) | code);
    if (place->straddles) store_words(high, load_words(high) | (vi)((vu)code >> 16));
}

/* Adds a digit of symbol `symbol` of every token to words that do not contain it yet. */
static void add_digit(const Encoded *out, const Packing *packing, uint16_t *words, int64_t digit, int64_t symbol, const int32_t *code) {
    int64_t column = symbol % packing->width, field = symbol / packing->width, plane = packing->width * HALF_TILE;
    const Digit *d = &packing->digit[digit];
    if (packing->binary) {
        Place place = place_of(packing, words, digit, symbol);
        for (int64_t t = 0; t < out->tokens; t += LANES) put_digit(&place, t, load_int(code + t));
        return;
    }
    words += column * HALF_TILE;
    double weight = d->weight;
    for (int64_t k = 0; k < field; k++) weight *= (double)d->base;
    if (packing->planes == 1) {
        for (int64_t t = 0; t < out->tokens; t += LANES) store_words(words + t, load_words(words + t) + load_int(code + t) * (int32_t)weight);
        return;
    }
    for (int64_t t = 0; t < out->tokens; t++) {
        uint64_t value = (uint64_t)code[t] * (uint64_t)weight;
        for (int64_t p = 0; p < packing->planes; p++, value >>= 16) {
            value += words[p * plane + t];
            words[p * plane + t] = (uint16_t)value;
        }
    }
}

/* Adds the first digit of symbol `i` of every token. If the digit is factored, its low bits and the rest are stored in separate packings.
   */
static void add_factored(const Codec *codec, const Encoded *out, int64_t i, const int32_t *digit) {
    const Packing *packing = codec->packing;
    if (!codec->factored) {
        add_digit(out, packing, out->words, 0, i, digit);
        return;
    }
    int32_t low[HALF_TILE], high[HALF_TILE], bits = (int32_t)packing[0].digit[0].bits;
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        store_int(low + t, load_int(digit + t) & ((1 << bits) - 1));
        store_int(high + t, load_int(digit + t) >> bits);
    }
    add_digit(out, packing, out->words, 0, i, low);
    add_digit(out, &packing[1], out->words + columns_before(codec, 1) * HALF_TILE, 0, i, high);
}

/* Returns the code of a number in one byte. */
static uint8_t log8_of(const float *table, float x) {
    const float *bounds = table + 256;
    int code = 0;
    for (int step = 128; step; step /= 2)
        if (x >= bounds[code + step - 1]) code += step;
    return (uint8_t)code;
}

static void write_numbers(const Values *values, const float *numbers, int64_t count, char *to, int64_t stride) {
    for (int64_t t = 0; values->dtype == LOG8 && t < count; t++) to[t * stride] = (char)log8_of(values->table, numbers[t]);
    if (values->dtype == LOG8) return;
    for (int64_t i = 0; i < values->count; i++)
        for (int64_t t = 0; t < count; t += LANES) {
            vf x = load(numbers + i * HALF_TILE + t);
            vi stored = values->dtype == F32 ? (vi)x : to_half(x);
            int64_t bytes = values->dtype == F32 ? 4 : 2;
            for (int j = 0; j < LANES && t + j < count; j++) {
                int32_t one = stored[j];
                memcpy(to + (t + j) * stride + i * bytes, &one, bytes);
            }
        }
}

/* Writes `count` tokens to the streams, starting with token `start`. */
static void write_streams(const Encode *call, const Encoded *out, int64_t batch, int64_t head, int64_t start, int64_t count) {
    const Codec *codec = call->codec;
    const Stream *stream = call->streams;
    uint16_t *words = out->words;
    for (int64_t i = 0; i < codec->packings; i++) {
        const Packing *packing = &codec->packing[i];
        int64_t width = packing->width, half_width = (width + 1) / 2;
        for (int64_t plane = 0; plane < packing->planes; plane++, stream++, words += width * HALF_TILE) {
            int halved = packing->odd && plane + 1 == packing->planes;
            for (int64_t w = half_width; halved && w < width; w++)
                for (int t = 0; t < HALF_TILE; t += LANES) {
                    uint16_t *low = words + (w - half_width) * HALF_TILE + t;
                    store_words(low, load_words(low) | load_words(words + w * HALF_TILE + t) << 8);
                }
            transpose_back(words, count, halved ? half_width : width, row_of(stream, batch, head, start), stream->row);
        }
    }
    const float *numbers = out->numbers;
    for (int64_t i = 0; i < codec->value_streams; i++, stream++) {
        write_numbers(&codec->values[i], numbers, count, row_of(stream, batch, head, start), stream->row);
        numbers += codec->values[i].count * HALF_TILE;
    }
}

/* The nearest integer between 0 and `most`, ties to even. */
INLINE vf bounded_steps(vf x, float most) {
    const vf magic = splat(12582912.f);
    return -larger(-larger(splat(0), x), splat(-most)) + magic - magic;
}

/* Counts the bounds below each of `count` vectors of values, among `levels` - 1 ascending bounds. `levels` is a power of two. */
INLINE void levels_of(const Table *bounds, int32_t levels, const vf *x, vi *level, int count) {
    int32_t step = levels > 8 ? levels / 8 : 1;
    UNROLLED for (int i = 0; i < count; i++) level[i] = splat_int(0);
    for (int32_t bound = step; bound < levels; bound += step)
        UNROLLED for (int i = 0; i < count; i++) level[i] = add_above(x[i], splat(bounds->data[bound - 1]), level[i], step);
    while (step /= 2)
        UNROLLED for (int i = 0; i < count; i++)
            level[i] = add_above(x[i], lookup(bounds->data, bounds->entries, level[i] + (step - 1)), level[i], step);
}

INLINE vi level_of(const Table *bounds, int32_t levels, vf x) {
    vi level;
    levels_of(bounds, levels, &x, &level, 1);
    return level;
}

/* The smallest norm that does not fit, and the largest one that does. For log8, these are 2^(142.5 / 16) and 2^(142 / 16). */
INLINE float norm_limit(int64_t dtype) { return dtype == F16 ? 65520.f : dtype == LOG8 ? 479.78691f : INFINITY; }
INLINE float largest_norm(int64_t dtype) { return dtype == F16 ? 65504.f : dtype == LOG8 ? 469.50607f : 3.4028234663852886e38f; }

/* Corresponds to unbiased_factor in formats/norm_rule.py. */
INLINE vf unbiased_factor(vf norm, vf product, vf decoded, vf squares, int64_t dtype) {
    vi kept = (product > 0.f) & (squares * decoded <= 2.f * product * product) & (norm < norm_limit(dtype));
    vf factor = -larger(-(norm * (squares / choose(kept, product, splat(1)))), splat(-largest_norm(dtype)));
    return choose(kept, factor, norm);
}

/* Returns the error of `factor` d, relative to |u|. */
INLINE vf relative_error(vf factor, vf product, vf decoded, vf squares) {
    vf error = squares - 2.f * factor * product + factor * factor * decoded;
    return square_root(larger(error, splat(0)) / choose(squares > 0.f, squares, splat(INFINITY)));
}

/* Stores the factors of LANES tokens from token `t` on, and their errors. A token is x = `norm` u, and u decodes to d. `product` is <u, d>,
   `decoded` is |d|^2, and `squares` is |u|^2. Errors are relative to |x|. */
INLINE void store_factors(const Encode *call, const Encoded *out, int64_t t, vf norm, vf product, vf decoded, vf squares) {
    vf factor = call->unbiased ? unbiased_factor(norm, product, decoded, squares, call->codec->values[0].dtype) : norm;
    store(out->numbers + t, factor);
    vf error = relative_error(factor / choose(norm > 0.f, norm, splat(INFINITY)), product, decoded, squares);
    store(out->errors + t, choose(norm > 0.f, error, splat(0)));
}
