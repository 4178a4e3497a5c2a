/* Encoding of octahedral: the direction nearest to each triplet, and the norm nearest to its projection (formats/octahedral.py). */

enum { DIRECTION_BOUNDS, NORM_BOUNDS, MAGNITUDES, MOST_CANDIDATES = 3 };

/* The product of a triplet, x and y positive, with the direction of coordinates (xi, eta), whose index this is (OCTOPUS Eq. 6). */
INLINE vf product_with(const Table *axis, vi index, vf xi, vf eta, vf x, vf y, vf z) {
    if (axis->entries <= MOST_IN_REGISTERS) {
        vf product = lookup(axis[0].data, axis[0].entries, index) * x;
        product += lookup(axis[1].data, axis[1].entries, index) * y;
        return product + lookup(axis[2].data, axis[2].entries, index) * z;
    }
    vf third = 1.f - xi - eta;
    vi folded = third < 0.f;
    vf first = choose(folded, 1.f - eta, xi), second = choose(folded, 1.f - xi, eta);
    return (first * x + second * y + third * z) / square_root(first * first + second * second + third * third);
}

/* The levels to try for a coordinate, the nearest first: that on its other side, or those on both sides. */
INLINE void candidates_of(const Encode *call, vf coordinate, int32_t levels, vi *found) {
    const Table *magnitudes = &call->bounds[MAGNITUDES];
    found[0] = level_of(&call->bounds[DIRECTION_BOUNDS], levels, coordinate);
    if (call->candidates == 2) {
        vf nearest = lookup(magnitudes->data, magnitudes->entries, found[0]);
        found[1] = found[0] + ((coordinate < nearest) | ((coordinate > nearest) & 1));
    } else {
        found[1] = found[0] - 1;
        found[2] = found[0] + 1;
    }
    for (int64_t i = 1; i < call->candidates; i++) found[i] = bounded(found[i], levels - 1);
}

/* The index of the nearest direction in the quarter square, the first of equals. `best` receives the product with it. */
INLINE vi nearest_direction(const Encode *call, int32_t levels, vf x, vf y, vf z, vf *best) {
    const Table *axis = call->codec->table, *magnitudes = &call->bounds[MAGNITUDES];
    vi found = splat_int(0), column[MOST_CANDIDATES], row[MOST_CANDIDATES];
    vf xi[MOST_CANDIDATES], eta[MOST_CANDIDATES];
    *best = splat(-INFINITY);
    if (!call->candidates) {
        for (int32_t i = 0; i < levels * levels; i++) {
            vf product = axis[0].data[i] * x + axis[1].data[i] * y + axis[2].data[i] * z;
            found = choose_int(product > *best, splat_int(i), found);
            *best = larger(product, *best);
        }
        return found;
    }
    /* OCTOPUS Eq. 5; below the fold 1 - y / sum is (x - z) / sum. */
    vf folded = larger(-z, splat(0)), per_sum = 1.f / larger(x + y + z + 2.f * folded, splat(1e-30f));
    candidates_of(call, (x + folded) * per_sum, levels, column);
    candidates_of(call, (y + folded) * per_sum, levels, row);
    for (int64_t i = 0; i < call->candidates; i++) {
        xi[i] = lookup(magnitudes->data, magnitudes->entries, column[i]);
        eta[i] = lookup(magnitudes->data, magnitudes->entries, row[i]);
    }
    for (int64_t j = 0; j < call->candidates; j++)
        for (int64_t i = 0; i < call->candidates; i++) {
            vi index = column[i] + row[j] * levels;
            vf product = product_with(axis, index, xi[i], eta[j], x, y, z);
            found = choose_int(product > *best, index, found);
            *best = larger(product, *best);
        }
    return found;
}

/* The digits of triplet `i`, from its direction, signs and norm. */
static void add_triplet(const Encode *call, const Encoded *out, int64_t i, int32_t *index, int32_t *sign) {
    const Codec *codec = call->codec;
    const Packing *packing = codec->packing;
    if (!codec->direct) {
        if (codec->packings == 2) add_digit(out, packing, out->words, 0, i, index);
        add_digit(out, &packing[codec->packings - 1], out->words + packing_place(codec, codec->packings - 1), 0, i, sign);
    } else if (packing->digits == 2) {
        add_digit(out, packing, out->words, 0, i, index);
        add_digit(out, packing, out->words, 1, i, sign);
    } else {
        for (int64_t t = 0; t < out->tokens; t += LANES) store_int(index + t, load_int(index + t) | load_int(sign + t) << (int32_t)codec->digit_bits);
        add_digit(out, packing, out->words, 0, i, index);
    }
}

static void octahedral_encode(const Encode *call, const Encoded *out) {
    const Codec *codec = call->codec;
    const Table *norms = &codec->table[TRIPLET_NORM];
    int32_t bits = (int32_t)codec->index_bits, levels = 1 << bits / 2, index[TILE], sign[TILE];
    float product[TILE] = {0}, squares[TILE] = {0};
    for (int64_t i = 0; 3 * i < codec->dim; i++) {
        const float *row = out->tile + 3 * i * TILE;
        for (int64_t t = 0; t < out->tokens; t += LANES) {
            vf x = load(row + t), y = load(row + TILE + t), z = load(row + 2 * TILE + t), projection;
            vf whole = larger(load(out->norm + t), splat(0x1p-126f));
            vi signs = ((x < 0.f) & 1) | ((y < 0.f) & 2);
            x = magnitude_of(x);
            y = magnitude_of(y);
            vi found = nearest_direction(call, levels, x, y, z, &projection);
            vf radius = call->candidates == 1 ? square_root(x * x + y * y + z * z) : projection;
            vi norm = level_of(&call->bounds[NORM_BOUNDS], (int32_t)codec->norm_levels, radius / whole);
            vf decoded = lookup(norms->data, norms->entries, norm);
            store(product + t, load(product + t) + projection / whole * decoded);
            store(squares + t, load(squares + t) + decoded * decoded);
            store_int(index + t, codec->norm_with_index ? found | norm << bits : found);
            store_int(sign + t, codec->norm_with_index ? signs : signs | norm << 2);
        }
        add_triplet(call, out, i, index, sign);
    }
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        vf norm = load(out->norm + t);
        if (call->unbiased) norm = unbiased_factor(norm, load(product + t), load(squares + t), splat(1), codec->values[0].dtype);
        store(out->numbers + t, norm);
    }
}
