/* Encodes angle: the bin that contains the direction of each pair, and the pair's norm (formats/angle.py). */

/* The logarithm that represents a norm of zero, and the number of octaves below a token's largest norm within which norms are kept. */
static const float ZERO_NORM = -65504, OCTAVES = 8;

/* Computes the angle of (x, y) as a fraction of a turn, from 0 to 1, and the length, with SLEEF's polynomial for the arctangent. */
INLINE vf turn_of(vf x, vf y, vf *length) {
    vf a = magnitude_of(x), b = magnitude_of(y), most = larger(a, b), ratio = -larger(-a, -b) / larger(most, splat(0x1p-126f));
    vf s = ratio * ratio, p = splat(0.00282363896258175373f);
    p = p * s - 0.0159569028764963150f;
    p = p * s + 0.0425049886107444763f;
    p = p * s - 0.0748900920152664185f;
    p = p * s + 0.106347933411598206f;
    p = p * s - 0.142027363181114197f;
    p = p * s + 0.199926957488059998f;
    p = p * s - 0.333331018686294556f;
    vf turn = (ratio + ratio * s * p) * 0.159154943f;
    *length = most * square_root(s + 1.f);
    turn = choose(b > a, .25f - turn, turn);
    turn = choose(x < 0.f, .5f - turn, turn);
    return choose(y < 0.f, 1.f - turn, turn);
}

/* Returns the binary logarithm (SLEEF's polynomial). Numbers below 2^-126 give the logarithm that represents zero. */
INLINE vf logarithm(vf x) {
    vi exponent = ((vi)x - 0x3f3504f3) >> 23;
    vf m = (vf)((vi)x - (exponent << 23)), r = (m - 1.f) / (m + 1.f), s = r * r, p = splat(0.2392828464508056640625f);
    p = p * s + 0.28518211841583251953125f;
    p = p * s + 0.400005877017974853515625f;
    p = p * s + 0.666666686534881591796875f;
    p = p * s + 2.f;
    return choose(x < 0x1p-126f, splat(ZERO_NORM), to_float(exponent) + r * p * 1.44269504f);
}

/* Stores the step and minimum of every token's norms, or of their logarithms, in binary16 or binary32. Returns false if one of them does
   not fit. */
static int norm_ranges(const Codec *codec, const Encoded *out, float *norms) {
    float *step = out->numbers, *minimum = out->numbers + HALF_TILE;
    vi good = splat_int(-1);
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        vf low = splat(INFINITY), high = splat(-INFINITY);
        for (int64_t i = 0; 2 * i < codec->dim; i++) high = larger(high, load(norms + i * HALF_TILE + t));
        for (int64_t i = 0; 2 * i < codec->dim; i++) {
            vf x = load(norms + i * HALF_TILE + t);
            if (codec->norm_kind == NORM_LOG) x = larger(larger(x, high - OCTAVES), splat(ZERO_NORM));
            store(norms + i * HALF_TILE + t, x);
            low = -larger(-low, -x);
        }
        vf wide = (high - low) / (float)(codec->norm_levels - 1);
        if (codec->values[0].dtype == F16) {
            good &= (magnitude_of(wide) < 65520.f) & (magnitude_of(low) < 65520.f);
            wide = from_half(to_half(wide));
            low = from_half(to_half(low));
        }
        store(step + t, wide);
        store(minimum + t, low);
    }
    for (int i = 0; i < LANES; i++)
        if (!good[i]) return 0;
    return 1;
}

static void add_pair(const Codec *codec, const Encoded *out, int64_t i, const int32_t *bin, const int32_t *code) {
    const Packing *packing = codec->packing;
    int64_t last = codec->packings - 1;
    add_factored(codec, out, i, bin);
    if (codec->norm_kind != NORM_STORED) add_digit(out, &packing[last], out->words + columns_before(codec, last) * HALF_TILE, codec->direct, i, code);
}

/* Multiplies the stored step and minimum of the norms by factors that correct products, unless the result does not fit. */
static void keep_products(const Codec *codec, const Encoded *out, const float *factors) {
    int64_t numbers = codec->norm_kind == NORM_LOG ? 0 : codec->numbers, half_range = codec->values[0].dtype == F16;
    float *minimum = out->numbers + HALF_TILE;
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        vf factor = load(factors + t);
        for (int64_t i = 0; half_range && i < numbers; i++)
            factor = choose(magnitude_of(load(out->numbers + i * HALF_TILE + t) * factor) < 65520.f, factor, splat(1));
        /* A factor that would make the step subnormal is not applied, because such a step is rounded coarsely, and codes were chosen for
           the rounded step. */
        if (codec->norm_kind == NORM_LINEAR) {
            vf step = load(out->numbers + t);
            factor = choose((step * factor >= (half_range ? 0x1p-14f : 0x1p-126f)) | (step == 0.f), factor, splat(1));
        }
        for (int64_t i = 0; i < numbers; i++) store(out->numbers + i * HALF_TILE + t, load(out->numbers + i * HALF_TILE + t) * factor);
        if (codec->norm_kind != NORM_LOG) continue;
        vf moved = load(minimum + t) + logarithm(factor);
        store(minimum + t, choose((magnitude_of(moved) < 65520.f) | (half_range ? 0 : -1), moved, load(minimum + t)));
    }
}

static int angle_encode(const Encode *call, const Encoded *out) {
    const Codec *codec = call->codec;
    int32_t bin[HALF_TILE], code[HALF_TILE];
    Directions from = directions_in(codec);
    float product[HALF_TILE] = {0}, squares[HALF_TILE] = {0}, sum[HALF_TILE] = {0}, most[HALF_TILE] = {0}, factors[HALF_TILE];
    float *norms = codec->norm_kind == NORM_STORED ? out->numbers : out->spare, *turns = out->spare + codec->dim * HALF_TILE;
    for (int64_t i = 0; 2 * i < codec->dim; i++)
        for (int64_t t = 0; t < out->tokens; t += LANES) {
            vf norm;
            store(turns + i * HALF_TILE + t, turn_of(load(out->tile + 2 * i * HALF_TILE + t), load(out->tile + (2 * i + 1) * HALF_TILE + t), &norm));
            store(most + t, larger(load(most + t), norm));
            store(norms + i * HALF_TILE + t, codec->norm_kind == NORM_LOG ? logarithm(norm) : norm);
        }
    if (codec->norm_kind != NORM_STORED && !norm_ranges(codec, out, norms)) return 0;
    for (int64_t i = 0; 2 * i < codec->dim; i++) {
        for (int64_t t = 0; t < out->tokens; t += LANES) {
            vf x = load(out->tile + 2 * i * HALF_TILE + t), y = load(out->tile + (2 * i + 1) * HALF_TILE + t);
            vf norm = load(norms + i * HALF_TILE + t), cosine, sine;
            vi found = bounded(to_int(load(turns + i * HALF_TILE + t) * (float)codec->bins), (int32_t)codec->bins - 1);
            if (codec->norm_kind != NORM_STORED) {
                vf step = load(out->numbers + t), minimum = load(out->numbers + HALF_TILE + t);
                vf steps = bounded_steps((norm - minimum) / choose(step > 0.f, step, splat(INFINITY)), (float)(codec->norm_levels - 1));
                store_int(code + t, to_int(steps));
                norm = minimum + step * steps;
                if (codec->norm_kind == NORM_LOG) norm = power_of_two(norm);
            }
            store_int(bin + t, found);
            /* Divided by the largest value, no square overflows. */
            vf scale = 1.f / larger(load(most + t), splat(0x1p-126f));
            directions_of(&from, found, &cosine, &sine);
            x *= scale, y *= scale, norm *= scale;
            store(product + t, load(product + t) + (x * cosine + y * sine) * norm);
            store(sum + t, load(sum + t) + x * x + y * y);
            store(squares + t, load(squares + t) + norm * norm);
        }
        add_pair(codec, out, i, bin, code);
    }
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        vf factor = splat(1);
        if (call->unbiased) factor = unbiased_factor(factor, load(product + t), load(squares + t), load(sum + t), F32);
        store(out->errors + t, relative_error(factor, load(product + t), load(squares + t), load(sum + t)));
        store(factors + t, factor);
    }
    if (call->unbiased) keep_products(codec, out, factors);
    return 1;
}
