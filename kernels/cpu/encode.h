/* One item of encoding: some tokens of one head, tile by tile, to the streams of formats/. */

/* Number of channels that are read, squared and rotated together. Adding up partial sums makes rounding errors smaller. */
enum { READ_TOGETHER = LANES < 8 ? 4 : 8 };

/* A row of zeros, of any dtype. */
static const char no_values[4 * 1024];

/* Loads `bytes` bytes, starting with byte `at`, from the rows of LANES tokens, and transposes them: vector i contains the i-th word of
   every token. */
INLINE void read_turned(const char *const *rows, int64_t ahead, int64_t at, int64_t bytes, vf *turned) {
    for (int64_t i = 0; i < LANES; i++) {
        const char *row = rows[i] + at;
        __builtin_prefetch(row + ahead, 0, 2);
        turned[i] = splat(0);
        if (bytes == 4 * LANES)
            turned[i] = (vf)load_int((const int32_t *)row);
        else
            memcpy(&turned[i], row, bytes);
    }
    turn(turned);
}

/* Loads the values of up to LANES tokens, divides channels by their factors and subtracts the tokens' mean if there are any, and stores them transposed, from column `t` of the tile on.
   They are multiplied by the rotation's factors, and norms are computed. Columns after the last token are zero. If `rotated` is set, the
   first steps of the rotation, over READ_TOGETHER channels, are done as well. */
INLINE void read_tokens(const Encode *call, const char *x, const float *divisors, const float *mean, int64_t tokens, int64_t t, const Encoded *out, int rotated,
                        int64_t dtype) {
    int64_t dim = call->codec->dim, each = dtype == F32 ? 1 : 2, size = 4 / each;
    const float *factors = call->rotation.order ? call->rotation.factors : NULL;
    float *tile = out->tile + t;
    const char *rows[LANES];
    vf sum = splat(0);
    for (int64_t i = 0; i < LANES; i++) rows[i] = i < tokens ? x + i * call->x.row : no_values;
    for (int64_t d = 0; d < dim; d += each * LANES) {
        vf turned[LANES];
        read_turned(rows, HALF_TILE * call->x.row, size * d, dim - d < each * LANES ? size * (dim - d) : 4 * LANES, turned);
        for (int64_t c = 0; c < each * LANES && d + c < dim; c += READ_TOGETHER) {
            int64_t here = rotated || d + c + READ_TOGETHER <= dim ? READ_TOGETHER : dim - d - c;
            vf value[READ_TOGETHER], part = splat(0);
            for (int64_t i = 0; i < READ_TOGETHER; i++) {
                value[i] = value_of((vu)turned[(c + i) >> (each - 1)], i % 2, dtype);
                if (divisors && d + c + i < dim) value[i] /= divisors[d + c + i];
                if (mean && d + c + i < dim) value[i] -= mean[d + c + i];
                part += value[i] * value[i];
            }
            sum += part;
            for (int64_t i = 0; i < here && factors; i++) value[i] *= factors[d + c + i];
            if (rotated) butterflies_of(READ_TOGETHER, value);
            for (int64_t i = 0; i < here; i++) store(tile + (d + c + i) * HALF_TILE, value[i]);
        }
    }
    store(out->norm + t, square_root(sum));
}

INLINE void read_tile_of(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, const Encoded *out, int rotated,
                         int64_t dtype) {
    const char *x = row_of(&call->x, batch, head, start);
    const float *divisors = call->factors.data ? (const float *)row_of(&call->factors, batch, head, 0) : NULL;
    for (int64_t t = 0; t < count; t += LANES) {
        const char *tokens = x + t * call->x.row;
        const float *mean = call->means.data ? (const float *)row_of(&call->means, batch, head, (start + t) / call->mean_tokens) : NULL;
        read_tokens(call, tokens, divisors, mean, count - t, t, out, rotated, dtype);
    }
}

/* Reads `count` tokens in the coded frame, and computes their norms. */
static void read_tile(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, const Encoded *out) {
    int64_t dim = call->codec->dim;
    int rotated = call->rotation.order == 1 && dim % READ_TOGETHER == 0;
    /* Other dtypes and tiles are rarer, so they share code. */
    if (rotated && call->dtype == BF16)
        read_tile_of(call, batch, head, start, count, out, 1, BF16);
    else if (rotated && call->dtype == F32)
        read_tile_of(call, batch, head, start, count, out, 1, F32);
    else
        read_tile_of(call, batch, head, start, count, out, rotated, call->dtype);
    rotate(&call->rotation, rotated ? READ_TOGETHER : call->rotation.order, dim, HALF_TILE, out->tokens, out->tile, out->spare);
    memset(out->tile + dim * HALF_TILE, 0, sizeof(float) * 3 * HALF_TILE);
}

/* Returns 1 if every norm is 0, or far from the limits of its stored format and from those of binary32 for squares. */
static int norms_fit(const Encode *call, const char *x, int64_t count, const Encoded *out) {
    int64_t each = call->dtype == F32 ? 1 : 2;
    uint32_t magnitude = each == 1 ? 0x7fffffff : 0x7fff;
    float limit = norm_limit(call->codec->values[0].dtype);
    if (limit > 0x1p60f) limit = 0x1p60f;
    for (int64_t t = 0; t < count; t++) {
        if (out->norm[t] > 0x1p-40f && out->norm[t] < limit) continue;
        for (int64_t d = 0; d < call->codec->dim; d++) {
            uint32_t value = 0;
            memcpy(&value, x + t * call->x.row + d * (4 / each), 4 / each);
            if (value & magnitude) return 0;
        }
    }
    return 1;
}

static int encode_tile(const Encode *call, const Encoded *out) {
    switch (call->codec->family) {
        case SCALAR: scalar_encode(call, out); return 1;
        case OCTAHEDRAL: octahedral_encode(call, out); return 1;
        case POLAR: polar_encode(call, out); return 1;
        case QUATERNION: quaternion_encode(call, out); return 1;
        case TRELLIS: trellis_encode(call, out); return 1;
        case ANGLE: return angle_encode(call, out);
        default: return 0;
    }
}

/* Encodes tokens [start, stop) of one head; `start` begins a token group. Returns false if formats/ must encode them or reject a value. */
static int encode_item(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t stop, Encoded *out) {
    const Codec *codec = call->codec;
    if (codec->family == MINIFLOAT) return encode_minifloats(call, batch, head, start, stop);
    if (codec->family == GROUP) return encode_groups(call, batch, head, start, stop, out->spare);
    for (; start < stop; start += HALF_TILE) {
        int64_t count = stop - start < HALF_TILE ? stop - start : HALF_TILE;
        out->tokens = (count + LANES - 1) / LANES * LANES;
        const char *x = row_of(&call->x, batch, head, start);
        read_tile(call, batch, head, start, count, out);
        if (!norms_fit(call, x, count, out)) return 0;
        memset(out->words, 0, 2 * HALF_TILE * codec->columns);
        if (!encode_tile(call, out)) return 0;
        int64_t row = (batch * call->heads + head) * call->tokens + start;
        if (call->norms) memcpy(call->norms + row, out->norm, sizeof(float) * count);
        if (call->errors) memcpy(call->errors + row, out->errors, sizeof(float) * count);
        write_streams(call, out, batch, head, start, count);
    }
    return 1;
}
