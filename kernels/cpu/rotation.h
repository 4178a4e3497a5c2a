/* formats/rotation.py: Sylvester's factor by butterflies, then Paley's of `order` by its matrix. Both work on the first `tokens` of rows of
   TILE, whole vectors of them. */

/* Two steps at once where there are two: half the passes over the tile. */
static void butterflies(int64_t order, int64_t dim, int64_t tokens, float *tile) {
    int64_t step = order;
    for (; 4 * step <= dim; step *= 4)
        for (int64_t first = 0; first < dim; first += 4 * step)
            for (int64_t d = first; d < first + step; d++)
                for (int64_t t = 0; t < tokens; t += LANES) {
                    float *row = tile + d * TILE + t;
                    vf a = load(row), b = load(row + step * TILE), c = load(row + 2 * step * TILE), e = load(row + 3 * step * TILE);
                    store(row, (a + b) + (c + e));
                    store(row + step * TILE, (a - b) + (c - e));
                    store(row + 2 * step * TILE, (a + b) - (c + e));
                    store(row + 3 * step * TILE, (a - b) - (c - e));
                }
    for (int64_t d = 0; step < dim && d < step; d++)
        for (int64_t t = 0; t < tokens; t += LANES) {
            float *row = tile + d * TILE + t;
            vf a = load(row), b = load(row + step * TILE);
            store(row, a + b);
            store(row + step * TILE, a - b);
        }
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
