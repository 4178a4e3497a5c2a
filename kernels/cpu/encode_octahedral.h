/* Encoding of octahedral: the direction nearest to each triplet, and the norm nearest to its projection (formats/octahedral.py). */

enum { DIRECTION_BOUNDS, NORM_BOUNDS, MAGNITUDES, PER_LENGTH, MOST_CANDIDATES = 3 };

/* The entries of a table of `count` values. */
INLINE int64_t entries_of(int64_t count) { return count < LEAST_ENTRIES ? LEAST_ENTRIES : count; }

/* 1 over the length of the point of coordinates (xi, eta) on the octahedron, whose index this is (OCTOPUS Eq. 6). */
INLINE vf per_length(const Table *table, int32_t levels, vi index, vf xi, vf eta) {
    if (levels * levels <= MOST_IN_REGISTERS) return lookup(table->data, entries_of(levels * levels), index);
    vf third = 1.f - xi - eta;
    vi folded = third < 0.f;
    vf first = choose(folded, 1.f - eta, xi), second = choose(folded, 1.f - xi, eta);
    return 1.f / square_root(first * first + second * second + third * third);
}

/* The levels to try for a coordinate: two, between which it is if they are not the first or the last, or the nearest and its neighbours. */
INLINE void candidates_of(const Encode *call, vf coordinate, int candidates, int32_t levels, vi *found) {
    const Table *bounds = &call->bounds[DIRECTION_BOUNDS];
    if (candidates == 2) {
        /* Two bounds fewer than magnitudes. */
        found[0] = level_of(bounds, levels > 8 ? levels : levels - 1, coordinate);
        found[1] = found[0] + 1;
        return;
    }
    found[0] = level_of(bounds, levels, coordinate);
    found[1] = found[0] - 1;
    found[2] = found[0] + 1;
    for (int i = 1; i < candidates; i++) found[i] = bounded(found[i], levels - 1);
}

/* The index of the nearest direction in the quarter square, the first of equals. `best` receives the product with it. */
INLINE vi nearest_direction(const Encode *call, int candidates, int32_t levels, vf x, vf y, vf z, vf *best) {
    const Table *axis = call->codec->table, *magnitudes = &call->bounds[MAGNITUDES];
    vi found = splat_int(0), column[MOST_CANDIDATES], row[MOST_CANDIDATES];
    vf xi[MOST_CANDIDATES], eta[MOST_CANDIDATES], across[MOST_CANDIDATES], up[MOST_CANDIDATES];
    *best = splat(-INFINITY);
    if (!candidates) {
        for (int32_t i = 0; i < levels * levels; i++) {
            vf product = axis[0].data[i] * x + axis[1].data[i] * y + axis[2].data[i] * z;
            found = (vi)pick_above(product, *best, (vf)splat_int(i), (vf)found);
            *best = larger(product, *best);
        }
        return found;
    }
    /* OCTOPUS Eq. 5; below the fold 1 - y / sum is (x - z) / sum. */
    vf folded = larger(-z, splat(0)), per_sum = 1.f / larger(x + y + z + 2.f * folded, splat(1e-30f));
    candidates_of(call, (x + folded) * per_sum, candidates, levels, column);
    candidates_of(call, (y + folded) * per_sum, candidates, levels, row);
    /* A point's product with the triplet is a sum of what each coordinate alone adds, and below the fold of what its depth there adds. */
    for (int i = 0; i < candidates; i++) {
        xi[i] = lookup(magnitudes->data, entries_of(levels), column[i]);
        eta[i] = lookup(magnitudes->data, entries_of(levels), row[i]);
        across[i] = xi[i] * (x - z);
        up[i] = z + eta[i] * (y - z);
    }
    for (int j = 0; j < candidates; j++)
        for (int i = 0; i < candidates; i++) {
            vi index = column[i] + row[j] * levels;
            vf product = across[i] + up[j] + (x + y) * smaller(1.f - xi[i] - eta[j], splat(0));
            product *= per_length(&call->bounds[PER_LENGTH], levels, index, xi[i], eta[j]);
            found = (vi)pick_above(product, *best, (vf)index, (vf)found);
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

INLINE void encode_triplets(const Encode *call, const Encoded *out, int candidates, int32_t levels, int32_t norm_levels) {
    const Codec *codec = call->codec;
    const Table *norms = &codec->table[TRIPLET_NORM];
    int32_t bits = (int32_t)codec->index_bits, index[TILE], sign[TILE];
    float product[TILE] = {0}, squares[TILE] = {0}, per_norm[TILE];
    for (int64_t t = 0; t < out->tokens; t += LANES) store(per_norm + t, 1.f / larger(load(out->norm + t), splat(0x1p-126f)));
    for (int64_t i = 0; 3 * i < codec->dim; i++) {
        const float *row = out->tile + 3 * i * TILE;
        for (int64_t t = 0; t < out->tokens; t += LANES) {
            vf x = load(row + t), y = load(row + TILE + t), z = load(row + 2 * TILE + t), projection;
            vi signs = add_above(splat(0), y, add_above(splat(0), x, splat_int(0), 1), 2);
            x = magnitude_of(x);
            y = magnitude_of(y);
            vi found = nearest_direction(call, candidates, levels, x, y, z, &projection);
            vf radius = candidates == 1 ? square_root(x * x + y * y + z * z) : projection;
            vi norm = level_of(&call->bounds[NORM_BOUNDS], norm_levels, radius * load(per_norm + t));
            vf decoded = lookup(norms->data, norms->entries, norm);
            store(product + t, load(product + t) + projection * load(per_norm + t) * decoded);
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

/* The candidates and levels of presets are known when this is compiled, others when it runs. */
static void octahedral_encode(const Encode *call, const Encoded *out) {
    int32_t levels = 1 << call->codec->index_bits / 2, norms = (int32_t)call->codec->norm_levels;
    if (call->candidates == 2 && levels == 4 && norms == 2)
        encode_triplets(call, out, 2, 4, 2);
    else if (call->candidates == 2 && levels == 8 && norms == 4)
        encode_triplets(call, out, 2, 8, 4);
    else if (call->candidates == 2 && levels == 16 && norms == 8)
        encode_triplets(call, out, 2, 16, 8);
    else
        encode_triplets(call, out, (int)call->candidates, levels, norms);
}
