/* Encoding of quaternion. If a chunk is rotated back by each secondary quaternion, its nearest Hurwitz unit has a closed form
   (formats/quaternion.py, quaternion_search.py). */

/* The product of (w, x, y, z) with the conjugate of a quaternion (a, b, c, d), of numbers or vectors. */
#define TURNED_BACK(out, in, a, b, c, d)                                  \
    vf out[4] = {in[0] * (a) + in[1] * (b) + in[2] * (c) + in[3] * (d),   \
                 in[1] * (a) - in[0] * (b) + in[3] * (c) - in[2] * (d),   \
                 in[2] * (a) - in[3] * (b) - in[0] * (c) + in[1] * (d),   \
                 in[3] * (a) + in[2] * (b) - in[1] * (c) - in[0] * (d)}

/* Chunk `i`: the place of the secondary quaternion of the nearest codeword, the first of equals, and the product with it. */
static void search_secondary(const Encode *call, const Encoded *out, int64_t i, int32_t *winner, float *best) {
    const float *row = out->tile + 4 * i * HALF_TILE, *secondary = call->bounds[0].data;
    int64_t count = call->bounds[0].entries / 4;
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        vf in[4] = {load(row + t), load(row + HALF_TILE + t), load(row + 2 * HALF_TILE + t), load(row + 3 * HALF_TILE + t)}, most = splat(-1);
        vi found = splat_int(0);
        for (int64_t s = 0; s < count; s++) {
            const float *q = secondary + 4 * s;
            TURNED_BACK(turned, in, q[0], q[1], q[2], q[3]);
            vf a = magnitude_of(turned[0]), b = magnitude_of(turned[1]), c = magnitude_of(turned[2]), d = magnitude_of(turned[3]);
            vf score = larger(larger(larger(a, b), larger(c, d)), (a + b + c + d) * .5f);
            found = choose_int(score > most, splat_int((int32_t)s), found);
            most = larger(score, most);
        }
        store_int(winner + t, found << 2);
        store(best + t, most);
    }
}

/* Computes the codewords of chunk `i`. In `codeword`, they replace the numbers of the secondary quaternions. A codeword is 2 axis + sign,
   or 8 plus the signs of a half unit. */
static void nearest_units(const Encoded *out, int64_t i, const float *secondary, int32_t *codeword) {
    const float *row = out->tile + 4 * i * HALF_TILE;
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        vf in[4] = {load(row + t), load(row + HALF_TILE + t), load(row + 2 * HALF_TILE + t), load(row + 3 * HALF_TILE + t)};
        vf most = splat(-1), sum = splat(0), chosen[4];
        vi unit = splat_int(0), half = splat_int(8);
        lookup_four(secondary, codeword + t, chosen);
        TURNED_BACK(turned, in, chosen[0], chosen[1], chosen[2], chosen[3]);
        for (int axis = 0; axis < 4; axis++) {
            vi negative = (vi)((vu)turned[axis] >> 31);
            vf size = magnitude_of(turned[axis]);
            unit = choose_int(size > most, 2 * axis + negative, unit);
            most = larger(size, most);
            sum += size;
            half += negative << axis;
        }
        unit = choose_int(sum * .5f > most, half, unit);
        store_int(codeword + t, load_int(codeword + t) * (24 / 4) + unit);
    }
}

static void add_chunk(const Codec *codec, const Encoded *out, int64_t i, const int32_t *codeword, const int32_t *radius) {
    const Packing *packing = codec->packing;
    add_factored(codec, out, i, codeword);
    int64_t last = codec->packings - 1;
    add_digit(out, &packing[last], out->words + columns_before(codec, last) * HALF_TILE, codec->direct, i, radius);
}

static void quaternion_encode(const Encode *call, const Encoded *out) {
    const Codec *codec = call->codec;
    int32_t codeword[HALF_TILE] = {0}, radius[HALF_TILE];
    float most[HALF_TILE] = {0}, product[HALF_TILE] = {0}, squares[HALF_TILE] = {0}, sum[HALF_TILE] = {0}, best[HALF_TILE];
    float *lengths = out->spare;
    for (int64_t i = 0; 4 * i < codec->dim; i++)
        for (int64_t t = 0; t < out->tokens; t += LANES) {
            const float *row = out->tile + 4 * i * HALF_TILE + t;
            vf w = load(row), x = load(row + HALF_TILE), y = load(row + 2 * HALF_TILE), z = load(row + 3 * HALF_TILE);
            vf length = square_root(w * w + x * x + y * y + z * z);
            store(lengths + i * HALF_TILE + t, length);
            store(most + t, larger(load(most + t), length));
        }
    /* Codes are computed with the stored scale. A scale of zero gives codes of zero. */
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        vf scale = load(most + t);
        store(most + t, codec->values[0].dtype == F16 ? from_half(to_half(scale)) : scale);
    }
    for (int64_t i = 0; 4 * i < codec->dim; i++) {
        search_secondary(call, out, i, codeword, best);
        nearest_units(out, i, call->bounds[0].data, codeword);
        for (int64_t t = 0; t < out->tokens; t += LANES) {
            vf scale = load(most + t), positive = choose(scale > 0.f, scale, splat(INFINITY));
            vf length = load(lengths + i * HALF_TILE + t) / positive, steps = bounded_steps(length * codec->highest, codec->highest);
            vf decoded = steps / codec->highest;
            store_int(radius + t, to_int(steps));
            store(product + t, load(product + t) + load(best + t) / positive * decoded);
            store(squares + t, load(squares + t) + decoded * decoded);
            store(sum + t, load(sum + t) + length * length);
        }
        add_chunk(codec, out, i, codeword, radius);
    }
    for (int64_t t = 0; t < out->tokens; t += LANES)
        store_factors(call, out, t, load(most + t), load(product + t), load(squares + t), load(sum + t));
}
