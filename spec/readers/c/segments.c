/* Token groups that the entropy coder codes: lossless and transform. */
#include "kvpack.h"

#include <math.h>
#include <string.h>

/* Walk through the segments of a side in the order of their words. */
typedef struct {
    uint64_t run, in_run, group, token,
        tokens;                     /* the run, the group's first token in it, and over all runs */
    uint64_t sequence, head, words; /* words before those of the segment */
    bool started;
} walk;

static bool next_segment(const kv_side *side, walk *w) {
    if (!w->started) {
        w->started = true;
    } else if (++w->head == side->heads) {
        w->head = 0;
        if (++w->sequence == side->batch) {
            w->sequence = 0;
            w->group++;
            w->token += w->tokens;
            w->in_run += w->tokens;
            if (w->in_run == side->runs[w->run]) {
                w->run++;
                w->in_run = 0;
            }
        }
    }
    if (w->run == side->run_count) return false;
    uint64_t left = side->runs[w->run] - w->in_run;
    w->tokens = left < side->codec->chunk ? left : side->codec->chunk;
    return true;
}

static uint64_t segment_row(const kv_side *side, const walk *w) {
    return (w->sequence * side->heads + w->head) * side->groups + w->group;
}

static uint64_t word_count(const kv_tensor *counts, uint64_t row) {
    if (counts->rank == 4) return kv_little(counts->data + 4 * row, 4);
    return kv_little(counts->data + 2 * row, 2);
}

/* Decode the exponent fields of lossless. */
static void read_exponents(kv_file *file, kv_side *side) {
    kv_reader *r = file->reader;
    const kv_codec *codec = side->codec;
    unsigned symbols = codec->choice[0] ? 32 : 256, dim = codec->dim;
    const kv_tensor *frequencies = kv_stream(side, "frequencies"), *states = kv_stream(side, "states");
    const kv_tensor *counts = kv_stream(side, "word_counts"), *words = kv_stream(side, "words");
    side->symbols = kv_take(r, kv_times(kv_times(side->batch * side->heads, side->packed), dim), 1);
    kv_block *mark = r->blocks;
    uint8_t *made = kv_take(r, 65536, 1);
    walk w = {0};
    while (next_segment(side, &w)) {
        uint16_t table[512];
        uint8_t slots[4096];
        const uint16_t *const tables[] = {table};
        const uint8_t *const all_slots[] = {slots};
        uint64_t row = segment_row(side, &w), head = w.sequence * side->heads + w.head;
        uint64_t size = word_count(counts, row), n = w.tokens * dim;
        kv_rans_table(r, frequencies->data + 2 * symbols * (head * side->run_count + w.run), symbols, table,
                      slots);
        kv_bytes bytes = {words->data + 2 * w.words, (size_t)(2 * size)};
        uint64_t taken = kv_rans(r, states->data + 128 * row, bytes, n, tables, all_slots, n, made);
        if (taken != size) kv_fail(r, INVALID_PAYLOAD, "rans-3", "symbols leave words");
        memcpy(side->symbols + (head * side->packed + w.token) * dim, made, (size_t)n);
        w.words += size;
    }
    kv_release(r, mark);
}

static void check_groups(kv_file *file, kv_side *side) {
    kv_reader *r = file->reader;
    const kv_tensor *tokens = kv_stream(side, "tokens"), *columns = kv_stream(side, "columns");
    const kv_tensor *states = kv_stream(side, "states");
    walk w = {0};
    while (next_segment(side, &w)) {
        uint64_t row = segment_row(side, &w), group = w.sequence * side->groups + w.group;
        if (kv_little(tokens->data + 2 * group, 2) != w.tokens)
            kv_fail(r, INVALID_PAYLOAD, "transform-8", "a token group has another number of tokens");
        if (kv_little(columns->data + 2 * row, 2) > side->codec->dim)
            kv_fail(r, INVALID_PAYLOAD, "transform-9", "a coded block has too many coordinates");
        for (int lane = 0; lane < 32; lane++)
            if (kv_little(states->data + 128 * row + 4 * lane, 4) < 65536)
                kv_fail(r, INVALID_PAYLOAD, "rans-2", "a first state is below 65536");
    }
}

/* Check the streams of lossless or transform, without a basis. */
void kv_check_segments(kv_file *file, kv_side *side) {
    bool lossless = side->codec->id == C_LOSSLESS;
    const kv_tensor *counts = kv_stream(side, "word_counts");
    uint64_t sum = 0, segments = lossless ? counts->count : counts->count / 2;
    for (uint64_t i = 0; i < segments; i++) sum += word_count(counts, i);
    if (sum != kv_stream(side, "words")->count)
        kv_fail(file->reader, INVALID_PAYLOAD, lossless ? "lossless-6" : "transform-10",
                "word_counts sum to %llu", (unsigned long long)sum);
    if (lossless) read_exponents(file, side);
    else check_groups(file, side);
}

typedef struct {
    const kv_tensor *frames, *scales, *values, *rope;
    bool halves;
    unsigned table_count, symbols, n;
    uint16_t *tables;
    uint8_t *slots;
} matrices;

/* The matrices that a side is coded by (rules transform-5 to transform-7). */
static void find_matrices(kv_file *file, kv_side *side, matrices *m) {
    kv_reader *r = file->reader;
    const kv_codec *codec = side->codec;
    bool keys = codec->choice[0] == 0;
    kv_file *basis = kv_basis(file, codec->basis, "transform-5");
    m->frames = kv_basis_state(basis, codec->layer, keys ? "k.frames" : "v.frames");
    if (!m->frames) kv_fail(r, INVALID_HEADER, "transform-6", "the basis has no matrices for the side");
    m->scales = kv_basis_state(basis, codec->layer, keys ? "k.scales" : "v.scales");
    const kv_side *vectors = basis->layers[codec->layer].sides[!keys];
    bool whole = codec->choice[1];
    uint64_t q = whole ? 1 : side->heads, n = whole ? side->heads * codec->dim : codec->dim;
    if (vectors->codec->dim != codec->dim || m->frames->shape[1] != q || m->frames->shape[3] != n)
        kv_fail(r, INVALID_HEADER, "transform-7", "the matrices of the basis are of other heads");
    m->n = (unsigned)n;
    m->rope = keys ? kv_basis_state(basis, codec->layer, "rope.halves") : NULL;
    m->halves = m->rope != NULL;
    if (keys && !m->rope) m->rope = kv_basis_state(basis, codec->layer, "rope.neighbours");
    const kv_tensor *frequencies = kv_basis_state(basis, 0, "table.frequencies");
    m->values = kv_basis_state(basis, 0, "table.values");
    m->table_count = (unsigned)frequencies->shape[1];
    m->symbols = (unsigned)frequencies->shape[2];
    m->tables = kv_take(r, 512 * (uint64_t)m->table_count, 2);
    m->slots = kv_take(r, 4096 * (uint64_t)m->table_count, 1);
    for (unsigned i = 0; i < m->table_count; i++)
        kv_rans_table(r, frequencies->data + 2 * i * m->symbols, m->symbols, m->tables + 512 * i,
                      m->slots + 4096 * i);
}

/* Turn a token to its position (basis.md, Rotary positions). */
static void turn(const matrices *m, double *x, uint64_t position) {
    uint64_t pairs = m->rope->shape[1];
    for (uint64_t i = 0; i < pairs; i++) {
        uint64_t a = m->halves ? i : 2 * i, b = m->halves ? i + pairs : 2 * i + 1;
        double angle = (double)position * (double)kv_number(F32, m->rope->data, i);
        double c = cos(angle), s = sin(angle), xa = x[a], xb = x[b];
        x[a] = xa * c - xb * s;
        x[b] = xb * c + xa * s;
    }
}

static unsigned table_of(const matrices *m, const kv_codec *codec, uint64_t matrix, uint64_t coordinate) {
    unsigned scale = m->scales->data[matrix * m->n + coordinate], step = codec->step;
    unsigned table = step > scale ? (step - scale) / 4 : 0;
    return table < m->table_count ? table : m->table_count - 1;
}

/* Decode all tokens of a side by its basis. */
void kv_decode_transform(kv_file *file, kv_side *side) {
    kv_reader *r = file->reader;
    const kv_codec *codec = side->codec;
    unsigned dim = codec->dim;
    bool whole = codec->choice[1];
    matrices m = {0};
    find_matrices(file, side, &m);
    uint64_t heads = side->heads, per_token = heads * dim;
    const kv_tensor *columns = kv_stream(side, "columns"), *states = kv_stream(side, "states");
    const kv_tensor *counts = kv_stream(side, "word_counts"), *words = kv_stream(side, "words");
    const kv_tensor *positions = codec->choice[0] ? NULL : kv_stream(side, "positions");
    side->early = kv_take(r, kv_times(side->batch * side->packed, per_token), sizeof(float));
    uint8_t *made = kv_take(r, 65536, 1);
    uint64_t most = side->packed < codec->chunk ? side->packed : codec->chunk;
    double *v = kv_take(r, kv_times(most, per_token), sizeof *v), *u = kv_take(r, per_token, sizeof *u);
    double delta = exp2(-(double)codec->step / 16);
    walk w = {0};
    while (next_segment(side, &w)) {
        uint64_t row = segment_row(side, &w), size = word_count(counts, row), matrix = whole ? 0 : w.head;
        uint64_t count = kv_little(columns->data + 2 * row, 2), escapes = 0;
        const uint16_t *tables[1024];
        const uint8_t *slots[1024];
        unsigned numbers[1024];
        for (uint64_t c = 0; c < count; c++) {
            numbers[c] = table_of(&m, codec, matrix, whole ? c * heads + w.head : c);
            tables[c] = m.tables + 512 * numbers[c];
            slots[c] = m.slots + 4096 * numbers[c];
        }
        kv_bytes bytes = {words->data + 2 * w.words, (size_t)(2 * size)};
        uint64_t n = count * w.tokens;
        uint64_t taken = kv_rans(r, states->data + 128 * row, bytes, n, tables, slots, w.tokens, made);
        for (uint64_t c = 0; c < dim; c++)
            for (uint64_t t = 0; t < w.tokens; t++) {
                /* Coordinates of all heads of a token follow one another. */
                double *to = &v[t * per_token + (whole ? c * heads + w.head : w.head * dim + c)];
                unsigned s = c < count ? made[c * w.tokens + t] : 1;
                if (!s) {
                    uint64_t at = taken + 2 * escapes++;
                    if (at + 2 > size)
                        kv_fail(r, INVALID_PAYLOAD, "transform-11", "escapes take more words than there are");
                    uint32_t level = (uint32_t)kv_little(bytes.data + 2 * at, 4);
                    *to = delta * (level >> 31 ? (double)level - 4294967296.0 : (double)level);
                } else {
                    uint64_t value = c < count ? (uint64_t)numbers[c] * (m.symbols - 1) + s - 1 : 0;
                    *to = c < count ? delta * kv_number(F16, m.values->data, value) : 0;
                }
            }
        if (taken + 2 * escapes != size)
            kv_fail(r, INVALID_PAYLOAD, "transform-11", "symbols and escapes leave words");
        w.words += size;
        if (w.head < heads - 1) continue;
        uint64_t group = w.sequence * side->groups + w.group;
        for (uint64_t t = 0; t < w.tokens; t++) {
            for (uint64_t q = 0; q < (whole ? 1 : heads); q++)
                for (uint64_t c = 0; c < m.n; c++) {
                    uint64_t first = q * (1 + m.n) * m.n;
                    double sum = kv_number(m.frames->dtype, m.frames->data, first + c);
                    for (uint64_t j = 0; j < m.n; j++)
                        sum += v[t * per_token + q * m.n + j] *
                               kv_number(m.frames->dtype, m.frames->data, first + (1 + j) * m.n + c);
                    u[q * m.n + c] = sum;
                }
            for (uint64_t h = 0; h < heads; h++) {
                if (m.rope) turn(&m, u + h * dim, kv_little(positions->data + 4 * group, 4) + t);
                float *to = side->early + ((w.sequence * heads + h) * side->packed + w.token + t) * dim;
                for (unsigned c = 0; c < dim; c++) to[c] = (float)u[h * dim + c];
            }
        }
    }
}
