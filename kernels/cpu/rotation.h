/* formats/rotation.py: Sylvester's factor by butterflies, then Paley's of `order` by its matrix. Both work on the first `tokens` of rows of
   TILE, whole vectors of them. */

/* `count` (a power of two) rows `step` apart from `first` on, in registers between their steps. */
INLINE void butterfly(int64_t count, int64_t first, int64_t step, int64_t tokens, float *tile) {
    for (int64_t d = first; d < first + step; d++)
        for (int64_t t = 0; t < tokens; t += LANES) {
            float *row = tile + d * TILE + t;
            vf x[8];
            for (int64_t i = 0; i < count; i++) x[i] = load(row + i * step * TILE);
            for (int64_t near = 1; near < count; near *= 2)
                for (int64_t i = 0; i < count; i++) {
                    if (i & near) continue;
                    vf a = x[i], b = x[i + near];
                    x[i] = a + b;
                    x[i + near] = a - b;
                }
            for (int64_t i = 0; i < count; i++) store(row + i * step * TILE, x[i]);
        }
}

/* Three steps at once where there are three: a third of the passes over the tile. */
static void butterflies(int64_t order, int64_t dim, int64_t tokens, float *tile) {
    int64_t step = order;
    for (; 8 * step <= dim; step *= 8)
        for (int64_t first = 0; first < dim; first += 8 * step) butterfly(8, first, step, tokens, tile);
    for (; 4 * step <= dim; step *= 4)
        for (int64_t first = 0; first < dim; first += 4 * step) butterfly(4, first, step, tokens, tile);
    if (step < dim) butterfly(2, 0, step, tokens, tile);
}

/* Products with the matrix, whose entry for row `d` and column `i` is at d * row + i * column: Paley's or its transpose. */
static void paley_products(const Rotation *rotation, int64_t row, int64_t column, int64_t dim, int64_t tokens, float *tile, float *spare) {
    int64_t order = rotation->order;
    for (int64_t first = 0; order > 1 && first < dim; first += order) {
        memcpy(spare, tile + first * TILE, sizeof(float) * order * TILE);
        for (int64_t d = 0; d < order; d++)
            for (int64_t t = 0; t < tokens; t += LANES) {
                vf sum = splat(0);
                for (int64_t i = 0; i < order; i++) sum += rotation->paley[d * row + i * column] * load(spare + i * TILE + t);
                store(tile + (first + d) * TILE + t, sum);
            }
    }
}

/* To the coded frame, from channels that were multiplied by their factors. */
static void rotate(const Rotation *rotation, int64_t dim, int64_t tokens, float *tile, float *spare) {
    if (!rotation->order) return;
    butterflies(rotation->order, dim, tokens, tile);
    paley_products(rotation, rotation->order, 1, dim, tokens, tile, spare);
}

static void rotate_back(const Rotation *rotation, int64_t dim, int64_t tokens, float *tile, float *spare) {
    if (!rotation->order) return;
    butterflies(rotation->order, dim, tokens, tile);
    paley_products(rotation, 1, rotation->order, dim, tokens, tile, spare);
    for (int64_t d = 0; d < dim; d++)
        for (int64_t t = 0; t < tokens; t += LANES) store(tile + d * TILE + t, load(tile + d * TILE + t) * rotation->factors[d]);
}
