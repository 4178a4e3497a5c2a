/* Encodes polar: level by level the angles of pairs, whose radii are the next level's values (formats/polar.py). */

/* Computes the codes of LANES angles above the first level, which are below a quarter turn. `tangents` are the tangents of the bounds
   between angles. */
INLINE vi quarter_codes(const Table *tangents, int32_t levels, vf first, vf second, vf *radius) {
    *radius = square_root(first * first + second * second);
    return level_of(tangents, levels, second / larger(first, splat(0x1p-126f)));
}

/* Encodes pair `a` of a level for every token. Row `a` of the radii, and of the products of values with decoded directions, receives the
   result. */
static void polar_pair(const Encode *call, const Encoded *out, int64_t level, int64_t a, const Table *tangents, const float *products) {
    const Codec *codec = call->codec;
    int64_t stream = codec->level_stream[level];
    const Packing *packing = &codec->packing[stream];
    const Table *cosines = &codec->table[4 * level + (a < codec->level_equal[level] ? 0 : 2)], *sines = cosines + 1;
    const float *first = out->tile + 2 * a * HALF_TILE, *second = first + HALF_TILE;
    const float *first_product = products + 2 * a * HALF_TILE, *second_product = first_product + HALF_TILE;
    int32_t code[HALF_TILE], levels = 1 << packing->digit[0].bits;
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        vf radius, x = load(first_product + t), y = load(second_product + t);
        vi own = level ? quarter_codes(tangents, levels, load(first + t), load(second + t), &radius)
                       : bounded(to_int(turn_of(x, y, &radius) * (float)levels), levels - 1);
        vf cosine = lookup(cosines->data, cosines->entries, own), sine = lookup(sines->data, sines->entries, own);
        store_int(code + t, own);
        store(out->tile + a * HALF_TILE + t, radius);
        store(out->spare + a * HALF_TILE + t, x * cosine + y * sine);
    }
    add_digit(out, packing, out->words + columns_before(codec, stream) * HALF_TILE, 0, codec->level_first[level] + a, code);
}

/* Stores the radii after the last level, times the factors that keep products unbiased, and the errors of the tokens. */
static void store_radii(const Encode *call, const Encoded *out) {
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        vf error = splat(0), squares = splat(0);
        for (int64_t i = 0; i < call->codec->radii; i++) {
            vf radius = load(out->tile + i * HALF_TILE + t), product = load(out->spare + i * HALF_TILE + t), factor = radius;
            vf cosine = product / choose(radius > 0.f, radius, splat(1));
            if (call->unbiased) factor = unbiased_factor(radius, cosine, splat(1), splat(1), call->codec->values[0].dtype);
            store(out->numbers + i * HALF_TILE + t, factor);
            error += radius * radius - 2.f * factor * product + factor * factor;
            squares += radius * radius;
        }
        store(out->errors + t, square_root(larger(error, splat(0)) / choose(squares > 0.f, squares, splat(INFINITY))));
    }
}

static void polar_encode(const Encode *call, const Encoded *out) {
    const Codec *codec = call->codec;
    const float *products = out->tile;
    Table tangents = call->bounds[0];
    int64_t count = codec->dim;
    for (int64_t level = 0; level < codec->levels; level++) {
        int64_t angles = codec->level_angles[level], levels = INT64_C(1) << codec->packing[codec->level_stream[level]].digit[0].bits;
        tangents.entries = levels > MIN_ENTRIES ? levels : MIN_ENTRIES;
        for (int64_t a = 0; a < angles; a++) {
            Table own = {tangents.data + (a < codec->level_equal[level] ? 0 : tangents.entries), tangents.entries};
            polar_pair(call, out, level, a, &own, products);
        }
        if (2 * angles < count) {
            memcpy(out->tile + angles * HALF_TILE, out->tile + 2 * angles * HALF_TILE, sizeof(float) * HALF_TILE);
            memcpy(out->spare + angles * HALF_TILE, products + 2 * angles * HALF_TILE, sizeof(float) * HALF_TILE);
        }
        if (level) tangents.data += 2 * tangents.entries;
        count -= angles;
        products = out->spare;
    }
    store_radii(call, out);
}
