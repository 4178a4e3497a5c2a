/* Bases: what their header and values must be, and those that a caller gives (basis.md). */
#include "kvpack.h"

#include <string.h>

static _Noreturn void refuse(kv_file *file, const char *rule, unsigned layer, const char *why) {
    kv_fail(file->reader, INVALID_HEADER, rule, "layer %u of the basis: %s", layer, why);
}

/* N(dim): the vectors of a head. */
unsigned kv_basis_vectors(unsigned dim) {
    unsigned bands = (dim + 15) / 16;
    return 2 + dim + (510 * bands + dim - 1) / dim;
}

kv_tensor *kv_basis_state(const kv_file *basis, unsigned layer, const char *name) {
    for (unsigned i = 0; i < basis->state_count; i++)
        if (basis->states[i].layer == layer && !strcmp(basis->states[i].name, name))
            return basis->states[i].tensor;
    return NULL;
}

static bool has_shape(const kv_tensor *t, kv_dtype a, kv_dtype b, unsigned rank, uint64_t x, uint64_t y,
                      uint64_t z) {
    uint64_t shape[] = {1, x, y, z};
    bool right = (t->dtype == a || t->dtype == b) && t->rank == rank;
    for (unsigned i = 0; right && i < rank; i++) right = t->shape[i] == shape[i];
    return right;
}

static void check_matrices(kv_file *file, unsigned l, unsigned which) {
    const kv_tensor *frames = kv_basis_state(file, l, which ? "v.frames" : "k.frames");
    const kv_tensor *scales = kv_basis_state(file, l, which ? "v.scales" : "k.scales");
    const kv_side *side = file->layers[l].sides[which];
    if (!frames && !scales) return;
    if (!frames || !scales || !side)
        refuse(file, "basis-8", l, "matrices, scales or vectors of a side are missing");
    uint64_t heads = side->heads, dim = side->codec->dim, whole = heads * dim;
    bool by_head =
        has_shape(frames, F16, F32, 4, heads, 1 + dim, dim) && has_shape(scales, U8, U8, 3, heads, dim, 0);
    bool by_layer =
        has_shape(frames, F16, F32, 4, 1, 1 + whole, whole) && has_shape(scales, U8, U8, 3, 1, whole, 0);
    if (!by_head && !by_layer) refuse(file, "basis-9", l, "matrices or scales have another dtype or shape");
}

/* The states of balanced keys; returns the head dim that they have, or 0. */
static uint64_t check_balanced(kv_file *file, unsigned l) {
    const kv_tensor *balanced = kv_basis_state(file, l, "k.balanced"),
                    *centered = kv_basis_state(file, l, "k.centered");
    const kv_tensor *queries = kv_basis_state(file, l, "k.queries"),
                    *mean = kv_basis_state(file, l, "k.mean");
    const kv_tensor *first = balanced ? balanced : centered;
    const kv_side *keys = file->layers[l].sides[0];
    if (!first) {
        if (queries || mean) refuse(file, "basis-21", l, "there are no balanced matrices");
        return 0;
    }
    uint64_t heads = keys ? keys->heads : first->shape[1], n = keys ? keys->codec->dim : first->shape[2];
    bool right = first->rank == 4 && n <= 1024;
    right = right && (!balanced || has_shape(balanced, F16, F32, 4, heads, n, n));
    right = right && (!centered || has_shape(centered, F16, F32, 4, heads, n, n));
    right = right && (!queries || has_shape(queries, F32, F32, 4, heads, n, n));
    right = right && (!mean || has_shape(mean, F32, F32, 3, heads, n, 0));
    if (!right) refuse(file, "basis-22", l, "a state of balanced keys has another dtype or shape");
    return n;
}

static void check_rope(kv_file *file, unsigned l, uint64_t balanced_dim) {
    const kv_tensor *halves = kv_basis_state(file, l, "rope.halves"),
                    *rope = kv_basis_state(file, l, "rope.neighbours");
    if (halves && rope) refuse(file, "basis-12", l, "there are two pairings of RoPE");
    rope = halves ? halves : rope;
    uint64_t dim = file->layers[l].sides[0] ? file->layers[l].sides[0]->codec->dim : balanced_dim;
    if (rope && (!has_shape(rope, F32, F32, 2, rope->shape[1], 0, 0) || 2 * rope->shape[1] > dim))
        refuse(file, "basis-13", l, "frequencies of RoPE have another dtype or shape");
}

void kv_check_basis_header(kv_file *file) {
    bool frames = false;
    for (unsigned l = 0; l < file->layer_count; l++) {
        for (unsigned which = 0; which < 2; which++) {
            const kv_side *side = file->layers[l].sides[which];
            if (side && (side->codec->id != C_RAW || side->codec->dtype == BF16))
                refuse(file, "basis-1", l, "a side has another codec than raw in fp16 or fp32");
            if (side && (side->batch != 1 || side->tail))
                refuse(file, "basis-2", l, "a side has several sequences or a tail");
            if (side && side->packed < kv_basis_vectors(side->codec->dim))
                refuse(file, "basis-3", l, "a side has too few vectors");
            check_matrices(file, l, which);
        }
        frames = frames || kv_basis_state(file, l, "k.frames") || kv_basis_state(file, l, "v.frames");
        check_rope(file, l, check_balanced(file, l));
    }
    const kv_tensor *frequencies = kv_basis_state(file, 0, "table.frequencies");
    const kv_tensor *values = kv_basis_state(file, 0, "table.values");
    if ((frames || frequencies || values) && (!frequencies || !values))
        refuse(file, "basis-10", 0, "tables are missing");
    if (!frequencies) return;
    uint64_t tables = frequencies->shape[1], symbols = frequencies->shape[2];
    bool right = has_shape(frequencies, U16, U16, 3, tables, symbols, 0) && tables <= 64 && symbols >= 4 &&
                 symbols <= 256 && symbols % 2 == 0 && has_shape(values, F16, F16, 3, tables, symbols - 1, 0);
    if (!right) refuse(file, "basis-11", 0, "tables have another dtype or shape");
}

static void check_finite(kv_file *file, unsigned layer, const char *name, const char *rule) {
    const kv_tensor *state = kv_basis_state(file, layer, name);
    if (state && !kv_all_finite(state->dtype, state->data, state->count))
        kv_fail(file->reader, INVALID_PAYLOAD, rule, "%s has a number that is not finite", state->name);
}

static void check_frequencies(kv_file *file, unsigned layer, const char *name) {
    const kv_tensor *rope = kv_basis_state(file, layer, name);
    for (uint64_t i = 0; rope && i < rope->count; i++) {
        float number = kv_number(F32, rope->data, i);
        if (!(number >= 0 && number <= 2))
            kv_fail(file->reader, INVALID_PAYLOAD, "basis-15", "a frequency of %s is not from 0 to 2",
                    rope->name);
    }
}

/* Check the values of a basis. */
void kv_check_basis(kv_file *file) {
    static const char *const balanced[] = {"k.balanced", "k.centered", "k.queries", "k.mean"};
    for (unsigned l = 0; l < file->layer_count; l++) {
        for (int which = 0; which < 2; which++) {
            const kv_side *side = file->layers[l].sides[which];
            const kv_tensor *values = side ? kv_stream(side, "values") : NULL;
            if (values && !kv_all_finite(values->dtype, values->data, values->count))
                kv_fail(file->reader, INVALID_PAYLOAD, "basis-4", "%s has a number that is not finite",
                        values->name);
        }
        check_finite(file, l, "k.frames", "basis-14");
        check_finite(file, l, "v.frames", "basis-14");
        for (int i = 0; i < 4; i++) check_finite(file, l, balanced[i], "basis-23");
        check_frequencies(file, l, "rope.halves");
        check_frequencies(file, l, "rope.neighbours");
    }
    check_finite(file, 0, "table.values", "basis-14");
    const kv_tensor *frequencies = kv_basis_state(file, 0, "table.frequencies");
    for (uint64_t i = 0; frequencies && i < frequencies->shape[1]; i++) {
        uint16_t table[512];
        uint8_t slots[4096];
        unsigned symbols = (unsigned)frequencies->shape[2];
        kv_rans_table(file->reader, frequencies->data + 2 * i * symbols, symbols, table, slots);
    }
}

/* The basis of a digest, if the caller has given it. */
kv_file *kv_basis(kv_file *file, kv_bytes digest, const char *rule) {
    kv_reader *r = file->reader;
    for (size_t i = 0; i < r->base_count; i++) {
        uint8_t found[32];
        kv_sha256(r->bases[i].data, r->bases[i].size, found);
        if (memcmp(found, digest.data, 32)) continue;
        if (!r->opened) r->opened = kv_take(r, r->base_count, sizeof *r->opened);
        if (!r->opened[i]) {
            kv_file *basis = kv_open(r, r->bases[i]);
            if (!basis->basis)
                kv_fail(r, INVALID_HEADER, "basis-18", "the file with the digest of the basis is a cache");
            kv_check(basis);
            r->opened[i] = basis;
        }
        return r->opened[i];
    }
    kv_fail(r, MISSING_BASIS, rule, "the basis %02x%02x%02x%02x... was not given", digest.data[0],
            digest.data[1], digest.data[2], digest.data[3]);
}
