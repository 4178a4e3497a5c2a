/* Encodes octahedral: the direction nearest to each triplet, and the norm nearest to its projection (formats/octahedral.py). */

enum { DIRECTION_BOUNDS, NORM_BOUNDS, MAGNITUDES, PER_LENGTH, IN_EVEN_BRACKETS = 4 };

static const int32_t NEIGHBOUR[] = {0, -1, 1};

/* Returns the number of entries in a table of `count` values, which may be padded. */
INLINE int64_t entries_of(int64_t count) { return count < MIN_ENTRIES ? MIN_ENTRIES : count; }

/* The reciprocal length of the point with the coordinates (xi, eta) on the octahedron, whose index this is (OCTOPUS Eq. 6). */
INLINE vf per_length(const Table *table, int32_t levels, vi index, vf xi, vf eta) {
    if (levels * levels <= MAX_IN_REGISTERS) return lookup(table->data, entries_of(levels * levels), index);
    vf third = 1.f - xi - eta;
    vi folded = third < 0.f;
    vf first = choose(folded, 1.f - eta, xi), second = choose(folded, 1.f - xi, eta);
    return reciprocal_root(first * first + second * second + third * third);
}

/* Returns the lower of the two levels around a coordinate, which is `length` times `per_sum`. If the levels are IN_EVEN_BRACKETS, a line
   gives their index. */
INLINE vi lower_level(const Encode *call, int candidates, int32_t levels, vf length, vf per_sum) {
    const Table *bounds = &call->bounds[DIRECTION_BOUNDS];
    if (candidates == IN_EVEN_BRACKETS) return to_int(smaller(length * per_sum + bounds->data[1], splat((float)levels - 1.5f)));
    /* There are two bounds fewer than magnitudes. */
    return level_of(bounds, levels > 8 ? levels : levels - 1, length * per_sum);
}

/* Like nearest_direction, but only for the two levels around each coordinate. The product of a point with the triplet is linear on both
   sides of the fold, and equals the smaller of the two. Each is a sum of one term per coordinate. */
INLINE vi nearest_in_bracket(const Encode *call, int candidates, int32_t levels, vf x, vf y, vf z, vf *best) {
    const float *magnitudes = call->bounds[MAGNITUDES].data;
    vf folded = larger(-z, splat(0)), sum = x + y + z, whole = larger(sum + 2.f * folded, splat(1e-30f)), per_sum;
    if (candidates == IN_EVEN_BRACKETS)
        per_sum = nearly_reciprocal(whole) * call->bounds[DIRECTION_BOUNDS].data[0];
    else
        per_sum = 1.f / whole;
    vi column = lower_level(call, candidates, levels, x + folded, per_sum), row = lower_level(call, candidates, levels, y + folded, per_sum);
    vi index = column + row * levels;
    vf xi[2], eta[2], above[2], below[2], product[4];
    for (int i = 0; i < 2; i++) {
        xi[i] = lookup(magnitudes, entries_of(levels), column + i);
        eta[i] = lookup(magnitudes, entries_of(levels), row + i);
        above[i] = z + xi[i] * (x - z);
        below[i] = sum - xi[i] * (y + z);
    }
    for (int j = 0; j < 2; j++)
        for (int i = 0; i < 2; i++) {
            vf linear = smaller(above[i] + eta[j] * (y - z), below[i] - eta[j] * (x + z));
            product[2 * j + i] = linear * per_length(&call->bounds[PER_LENGTH], levels, index + (i + j * levels), xi[i], eta[j]);
        }
    vf first = larger(product[1], product[0]), second = larger(product[3], product[2]);
    vi of_first = add_above(product[1], product[0], index, 1), of_second = add_above(product[3], product[2], index + levels, 1);
    *best = larger(second, first);
    return (vi)pick_above(second, first, (vf)of_second, (vf)of_first);
}

/* Returns the index of the nearest direction in the quarter square, or the first of several equally near ones. `best` receives the product
   with it. */
INLINE vi nearest_direction(const Encode *call, int candidates, int32_t levels, vf x, vf y, vf z, vf *best) {
    const Table *axis = call->codec->table, *magnitudes = &call->bounds[MAGNITUDES], *bounds = &call->bounds[DIRECTION_BOUNDS];
    if (candidates == 2 || candidates == IN_EVEN_BRACKETS) return nearest_in_bracket(call, candidates, levels, x, y, z, best);
    vi found = splat_int(0);
    *best = splat(-INFINITY);
    if (!candidates) {
        for (int32_t i = 0; i < levels * levels; i++) {
            vf product = axis[0].data[i] * x + axis[1].data[i] * y + axis[2].data[i] * z;
            found = (vi)pick_above(product, *best, (vf)splat_int(i), (vf)found);
            *best = larger(product, *best);
        }
        return found;
    }
    /* OCTOPUS Eq. 5. Below the fold, 1 - y / sum equals (x - z) / sum. The nearest levels come first, followed by their neighbors. */
    vf folded = larger(-z, splat(0)), per_sum = 1.f / larger(x + y + z + 2.f * folded, splat(1e-30f));
    vi column = level_of(bounds, levels, (x + folded) * per_sum), row = level_of(bounds, levels, (y + folded) * per_sum);
    for (int j = 0; j < candidates; j++) {
        vi up = bounded(row + NEIGHBOUR[j], levels - 1);
        vf eta = lookup(magnitudes->data, entries_of(levels), up);
        for (int i = 0; i < candidates; i++) {
            vi across = bounded(column + NEIGHBOUR[i], levels - 1), index = across + up * levels;
            vf xi = lookup(magnitudes->data, entries_of(levels), across);
            vf product = xi * (x - z) + (z + eta * (y - z)) + (x + y) * smaller(1.f - xi - eta, splat(0));
            product *= per_length(&call->bounds[PER_LENGTH], levels, index, xi, eta);
            found = (vi)pick_above(product, *best, (vf)index, (vf)found);
            *best = larger(product, *best);
        }
    }
    return found;
}

/* The positions of the digits of triplet `i`: that of the direction, which does not exist if directions have no bits, and that of the
   signs. If `joined` is set, both are in one symbol. */
typedef struct {
    Place index, sign;
    int has_index, joined;
} TripletPlaces;

INLINE TripletPlaces places_of(const Codec *codec, uint16_t *words, int64_t i) {
    const Packing *packing = codec->packing, *last = &packing[codec->packings - 1];
    TripletPlaces found = {.has_index = codec->packings == 2 || packing->digits == 2, .joined = codec->direct && packing->digits == 1};
    if (found.has_index) found.index = place_of(packing, words, 0, i);
    found.sign = place_of(last, words + columns_before(codec, codec->packings - 1) * HALF_TILE, codec->direct ? packing->digits - 1 : 0, i);
    return found;
}

INLINE void encode_triplets(const Encode *call, const Encoded *out, int candidates, int32_t levels, int32_t norm_levels) {
    const Codec *codec = call->codec;
    const Table *norms = &codec->table[TRIPLET_NORM];
    int32_t bits = (int32_t)codec->index_bits;
    float product[HALF_TILE] = {0}, squares[HALF_TILE] = {0}, per_norm[HALF_TILE];
    for (int64_t t = 0; t < out->tokens; t += LANES) store(per_norm + t, 1.f / larger(load(out->norm + t), splat(0x1p-126f)));
    for (int64_t i = 0; 3 * i < codec->dim; i++) {
        const float *row = out->tile + 3 * i * HALF_TILE;
        TripletPlaces places = places_of(codec, out->words, i);
        for (int64_t t = 0; t < out->tokens; t += LANES) {
            vf x = load(row + t), y = load(row + HALF_TILE + t), z = load(row + 2 * HALF_TILE + t), projection;
            vi signs = add_above(splat(0), y, add_above(splat(0), x, splat_int(0), 1), 2);
            x = magnitude_of(x);
            y = magnitude_of(y);
            vi found = nearest_direction(call, candidates, levels, x, y, z, &projection);
            vf radius = candidates == 1 ? square_root(x * x + y * y + z * z) : projection;
            vi norm = level_of(&call->bounds[NORM_BOUNDS], norm_levels, radius * load(per_norm + t));
            vf decoded = lookup(norms->data, norms->entries, norm);
            store(product + t, load(product + t) + projection * load(per_norm + t) * decoded);
            store(squares + t, load(squares + t) + decoded * decoded);
            if (codec->norm_with_index)
                found |= norm << bits;
            else
                signs |= norm << 2;
            if (places.has_index) put_digit(&places.index, t, found);
            put_digit(&places.sign, t, places.joined ? found | signs << (int32_t)codec->digit_bits : signs);
        }
    }
    for (int64_t t = 0; t < out->tokens; t += LANES)
        store_factors(call, out, t, load(out->norm + t), load(product + t), load(squares + t), splat(1));
}

/* For presets, the numbers of candidates and levels are compile-time constants. For other codecs, they are only known at run time. */
static void octahedral_encode(const Encode *call, const Encoded *out) {
    int32_t levels = 1 << call->codec->index_bits / 2, norms = (int32_t)call->codec->norm_levels;
    if (call->candidates == IN_EVEN_BRACKETS && levels == 4 && norms == 2)
        encode_triplets(call, out, IN_EVEN_BRACKETS, 4, 2);
    else if (call->candidates == IN_EVEN_BRACKETS && levels == 8 && norms == 4)
        encode_triplets(call, out, IN_EVEN_BRACKETS, 8, 4);
    else if (call->candidates == 2 && levels == 16 && norms == 8)
        encode_triplets(call, out, 2, 16, 8);
    else
        encode_triplets(call, out, (int)call->candidates, levels, norms);
}
