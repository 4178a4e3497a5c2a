/* The rotations of formats/rotation.py: Sylvester's factor by butterflies, followed by Paley's factor of `order` by its matrix. Both
   process the first `tokens` tokens of rows of `width`, as whole vectors. */

/* Number of rows that are kept in registers for several steps of one pass: half of the 32 vector registers of AVX-512, or of the 16 of AVX2
   and SSE2. */
enum { STEPS_TOGETHER = LEVEL == 4 ? 16 : 8 };

/* The steps between `count` vectors, a power of two. */
INLINE void butterflies_of(int64_t count, vf *x) {
    UNROLLED for (int64_t near = 1; near < count; near *= 2) UNROLLED for (int64_t i = 0; i < count; i++) {
        if (i & near) continue;
        vf a = x[i], b = x[i + near];
        x[i] = a + b;
        x[i + near] = a - b;
    }
}

/* The same for rows `step` apart, beginning with row `first`. */
INLINE void butterfly(int64_t count, int64_t first, int64_t step, int64_t width, int64_t tokens, float *tile) {
    for (int64_t d = first; d < first + step; d++)
        for (int64_t t = 0; t < tokens; t += LANES) {
            float *to = tile + d * width + t;
            vf x[STEPS_TOGETHER];
            UNROLLED for (int64_t i = 0; i < count; i++) x[i] = load(to + i * step * width);
            butterflies_of(count, x);
            UNROLLED for (int64_t i = 0; i < count; i++) store(to + i * step * width, x[i]);
        }
}

/* Does the remaining steps, starting with `step`, with as many steps per pass as registers permit, so that few passes over the tile are
   needed. */
static void butterflies(int64_t step, int64_t dim, int64_t width, int64_t tokens, float *tile) {
    for (; STEPS_TOGETHER * step <= dim; step *= STEPS_TOGETHER)
        for (int64_t first = 0; first < dim; first += STEPS_TOGETHER * step) butterfly(STEPS_TOGETHER, first, step, width, tokens, tile);
    for (; 8 * step <= dim; step *= 8)
        for (int64_t first = 0; first < dim; first += 8 * step) butterfly(8, first, step, width, tokens, tile);
    for (; 4 * step <= dim; step *= 4)
        for (int64_t first = 0; first < dim; first += 4 * step) butterfly(4, first, step, width, tokens, tile);
    if (step < dim) butterfly(2, 0, step, width, tokens, tile);
}

/* Multiplies by the matrix, whose entry for row `d` and column `i` is at d * row + i * column. This is Paley's matrix or its transpose. */
static void paley_products(const Rotation *rotation, int64_t row, int64_t column, int64_t dim, int64_t width, int64_t tokens,
                           float *tile, float *spare) {
    int64_t order = rotation->order;
    for (int64_t first = 0; order > 1 && first < dim; first += order) {
        memcpy(spare, tile + first * width, sizeof(float) * order * width);
        for (int64_t d = 0; d < order; d++)
            for (int64_t t = 0; t < tokens; t += LANES) {
                vf sum = splat(0);
                for (int64_t i = 0; i < order; i++) sum += rotation->paley[d * row + i * column] * load(spare + i * width + t);
                store(tile + (first + d) * width + t, sum);
            }
    }
}

/* Rotates channels, which have been multiplied by their factors, to the coded frame. Steps below `step` have already been done. */
static void rotate(const Rotation *rotation, int64_t step, int64_t dim, int64_t width, int64_t tokens, float *tile, float *spare) {
    if (!rotation->order) return;
    butterflies(step, dim, width, tokens, tile);
    paley_products(rotation, rotation->order, 1, dim, width, tokens, tile, spare);
}

static void rotate_back(const Rotation *rotation, int64_t dim, float *tile, float *spare) {
    if (!rotation->order) return;
    butterflies(rotation->order, dim, TILE, TILE, tile);
    paley_products(rotation, 1, rotation->order, dim, TILE, TILE, tile, spare);
    for (int64_t d = 0; d < dim; d++)
        for (int64_t t = 0; t < TILE; t += LANES) store(tile + d * TILE + t, load(tile + d * TILE + t) * rotation->factors[d]);
}
