/* Encodes trellis: the string whose values are nearest to the unit vector, by two Viterbi searches (formats/trellis.py).

A vector holds one state of LANES tokens, so that every step of a search runs along memory. */

/* Greater than the cost of any path. */
static const float NO_PATH = 1e30f;

typedef struct {
    float *cost;   /* [state][LANES] */
    float *least;  /* [kept][LANES]: costs of the states that share all bits but the lowest, which leave the window */
    uint8_t *back; /* [channel][kept][LANES]: those lowest bits */
    int32_t *path; /* [channel][LANES] */
} Search;

static int64_t search_bytes(const Codec *codec) {
    int64_t states = (int64_t)1 << codec->index_bits, kept = states >> codec->digit_bits;
    return codec->family == TRELLIS ? LANES * (4 * states + 4 * kept + codec->dim * kept + 4 * codec->dim) + 256 : 0;
}

INLINE Search search_in(const Codec *codec, void *memory) {
    int64_t states = (int64_t)1 << codec->index_bits, kept = states >> codec->digit_bits;
    float *cost = memory, *least = cost + LANES * states;
    int32_t *path = (int32_t *)(least + LANES * kept);
    return (Search){cost, least, (uint8_t *)(path + LANES * codec->dim), path};
}

/* Finds the cheapest path to each of the states `kept`, over the previous states that differ in the bits that leave the window. The lowest
   bits of a cost identify its previous state. */
INLINE void step_back(const Search *search, int64_t kept, int32_t symbols, uint8_t *back) {
    for (int64_t m = 0; m < kept; m++) {
        const float *from = search->cost + m * symbols * LANES;
        vf best = (vf)((vi)load(from) & -symbols);
        for (int32_t a = 1; a < symbols; a++) best = smaller((vf)(((vi)load(from + a * LANES) & -symbols) | a), best);
        store(search->least + m * LANES, best);
        vb dropped = __builtin_convertvector((vi)best & (symbols - 1), vb);
        memcpy(back + m * LANES, &dropped, LANES);
    }
}

/* Finds the path of LANES tokens through `x` [channel][HALF_TILE], starting at channel `turn`. `shared` contains the bits that the first
   window has in common with the last, or is NULL. */
static void find_path(const Codec *codec, const Search *search, const float *x, int64_t turn, const vi *shared) {
    const float *table = codec->table[0].data;
    int64_t bits = codec->digit_bits, states = (int64_t)1 << codec->index_bits, kept = states >> bits, dim = codec->dim;
    int32_t symbols = 1 << bits;
    vf first = load(x + turn * HALF_TILE);
    for (int64_t s = 0; s < states; s++) {
        vf apart = first - table[s], cost = apart * apart;
        if (shared) cost = choose(*shared == (int32_t)(s & (kept - 1)), cost, splat(NO_PATH));
        store(search->cost + s * LANES, cost);
    }
    for (int64_t i = 1; i < dim; i++) {
        step_back(search, kept, symbols, search->back + i * kept * LANES);
        vf value = load(x + (turn + i) % dim * HALF_TILE);
        for (int64_t s = 0; s < states; s++) {
            vf apart = value - table[s];
            store(search->cost + s * LANES, load(search->least + (s & (kept - 1)) * LANES) + apart * apart);
        }
    }
    vf best = splat(INFINITY);
    vi last = splat_int(0);
    for (int64_t s = 0; s < states; s++) {
        vf cost = load(search->cost + s * LANES);
        if (shared) cost = choose(*shared == (int32_t)(s >> bits), cost, splat(NO_PATH));
        vi less = cost < best;
        best = choose(less, cost, best);
        last = choose_int(less, splat_int((int32_t)s), last);
    }
    for (int64_t i = dim - 1; i >= 0; i--) {
        int32_t *path = search->path + i * LANES;
        store_int(path, last);
        if (i == 0) break;
        const uint8_t *back = search->back + i * kept * LANES;
        for (int lane = 0; lane < LANES; lane++) {
            int64_t low = path[lane] & (kept - 1);
            last[lane] = (int32_t)(low << bits | back[low * LANES + lane]);
        }
    }
}

static void trellis_encode(const Encode *call, const Encoded *out) {
    const Codec *codec = call->codec;
    const Table *table = &codec->table[0];
    Search search = search_in(codec, out->space);
    int64_t dim = codec->dim, bits = codec->digit_bits, half = dim / 2;
    for (int64_t t = 0; t < out->tokens; t += LANES) {
        float *x = out->tile + t;
        vf norm = load(out->norm + t), per_norm = 1.f / larger(norm, splat(0x1p-126f));
        for (int64_t c = 0; c < dim; c++) store(x + c * HALF_TILE, load(x + c * HALF_TILE) * per_norm);
        /* The token is rotated by half of its length, so that its last channel is in the middle. */
        find_path(codec, &search, x, half, NULL);
        vi shared = load_int(search.path + (dim - 1 - half) * LANES) >> (int32_t)bits;
        find_path(codec, &search, x, 0, &shared);
        vf product = splat(0), squares = splat(0);
        for (int64_t c = 0; c < dim; c++) {
            vi state = load_int(search.path + c * LANES);
            vf decoded = lookup(table->data, table->entries, state);
            product += load(x + c * HALF_TILE) * decoded;
            squares += decoded * decoded;
            int64_t at = bits * c;
            uint16_t *word = out->words + at / 16 * HALF_TILE + t;
            vi symbol = state >> (int32_t)(codec->index_bits - bits) << (int32_t)(at % 16);
            store_words(word, load_words(word) | (symbol & 0xffff));
            if (at % 16 + bits > 16) store_words(word + HALF_TILE, load_words(word + HALF_TILE) | symbol >> 16);
        }
        store_factors(call, out, t, norm, product, squares, splat(1));
    }
}
