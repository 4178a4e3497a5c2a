/* Encodes scalar: the nearest magnitude and a sign per channel of the unit vector, or of a multiple of it (formats/scalar.py). */

enum { SCALES = 4 };

/* Finds, among the multiples of each token's unit vector that formats/scalar.py defines, the one whose decoded direction is nearest to the
   token's, and its sums over decoded values. */
static void best_scales(const Encode *call, const Encoded *out, const float *per_norm, float *best, float *best_product,
                        float *best_squares) {
    static const float scales[SCALES] = {.85f, .95f, 1.05f, 1.15f};
    const Codec *codec = call->codec;
    float whole[HALF_TILE], product[SCALES][HALF_TILE], squares[SCALES][HALF_TILE];
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        const int32_t *channel = codec->channels;
        vf square = splat(0), with_error[SCALES], of_error[SCALES];
        UNROLLED for (int s = 0; s < SCALES; s++) with_error[s] = of_error[s] = splat(0);
        for (int64_t part = 0; part < codec->packings; part++) {
            const Packing *packing = &codec->packing[part];
            const Table *table = &codec->table[part];
            for (int64_t i = 0; i < packing->symbols; i++) {
                vf x = magnitude_of(load(out->tile + *channel++ * HALF_TILE + t) * load(per_norm + t)), multiple[SCALES];
                vi level[SCALES];
                square += x * x;
                UNROLLED for (int s = 0; s < SCALES; s++) multiple[s] = x * scales[s];
                levels_of(&call->bounds[part], (int32_t)packing->digit[0].base / 2, multiple, level, SCALES);
                UNROLLED for (int s = 0; s < SCALES; s++) {
                    vf error = multiple[s] - lookup(table->data, table->entries, level[s]);
                    with_error[s] += x * error;
                    of_error[s] += error * error;
                }
            }
        }
        store(whole + t, square);
        UNROLLED for (int s = 0; s < SCALES; s++) store(product[s] + t, with_error[s]), store(squares[s] + t, of_error[s]);
    }
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        vf scale = splat(0), of_best = splat(0), squares_of_best = splat(0), sine_of_best = splat(0), square = load(whole + t);
        for (int s = 0; s < SCALES; s++) {
            vf with_error = load(product[s] + t), of_error = load(squares[s] + t);
            vf own_sine = square * of_error - with_error * with_error;
            vf own_squares = scales[s] * (scales[s] * square - 2 * with_error) + of_error;
            vi better = s == 0 ? splat(0) == splat(0) : own_sine * squares_of_best < sine_of_best * own_squares;
            scale = choose(better, splat(scales[s]), scale);
            of_best = choose(better, scales[s] * square - with_error, of_best);
            squares_of_best = choose(better, own_squares, squares_of_best);
            sine_of_best = choose(better, own_sine, sine_of_best);
        }
        store(best + t, scale);
        store(best_product + t, of_best);
        store(best_squares + t, squares_of_best);
    }
}

static void scalar_encode(const Encode *call, const Encoded *out) {
    const Codec *codec = call->codec;
    const int32_t *channel = codec->channels;
    int32_t code[HALF_TILE];
    float product[HALF_TILE] = {0}, squares[HALF_TILE] = {0}, per_norm[HALF_TILE], scale[HALF_TILE];
    for (int64_t t = 0; t < out->tokens; t += LANES) store(per_norm + t, 1.f / larger(load(out->norm + t), splat(0x1p-126f)));
    if (call->scaled) best_scales(call, out, per_norm, scale, product, squares);
    for (int64_t part = 0; part < codec->packings; part++) {
        const Packing *packing = &codec->packing[part];
        const Table *table = &codec->table[part];
        int32_t magnitudes = (int32_t)packing->digit[0].base / 2;
        uint16_t *words = out->words + columns_before(codec, part) * HALF_TILE;
        for (int64_t i = 0; i < packing->symbols; i++) {
            const float *row = out->tile + *channel++ * HALF_TILE;
            for (int64_t t = 0; t < out->tokens; t += LANES) {
                vf x = load(row + t) * load(per_norm + t);
                vf magnitude = call->scaled ? magnitude_of(x) * load(scale + t) : magnitude_of(x);
                vi symbol = add_above(splat(0), x, level_of(&call->bounds[part], magnitudes, magnitude), magnitudes);
                store_int(code + t, symbol);
                /* The codes of the best multiple are already in place. */
                if (call->scaled) continue;
                vf decoded = lookup(table->data, table->entries, symbol);
                store(product + t, load(product + t) + x * decoded);
                store(squares + t, load(squares + t) + decoded * decoded);
            }
            add_digit(out, packing, words, 0, i, code);
        }
    }
    for (int64_t t = 0; t < out->tokens; t += LANES)
        store_factors(call, out, t, load(out->norm + t), load(product + t), load(squares + t), splat(1));
}
