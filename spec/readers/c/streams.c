/* The streams of a side, in the order of the documents of codecs and side-cars. */
#include "kvpack.h"

#include <stdio.h>
#include <string.h>

/* Whether a codec or a side-car of it has a stream with one row per run. */
bool kv_rows_per_run(const kv_codec *codec) {
    bool own = false;
    if (codec->id == C_GROUP) own = codec->choice[2];
    if (codec->id == C_KLT) own = codec->choice[1] != 0;
    if (codec->id == C_LOSSLESS) own = true;
    if (codec->id == C_MINIFLOAT) own = codec->choice[1] < 2 || (codec->choice[1] == 3 && codec->choice[2]);
    return own || codec->cars & (1u << S_SCALE | 1u << S_ORDER);
}

static kv_tensor *add(kv_file *file, kv_side *side, const char *name, kv_dtype dtype, unsigned rank,
                      const uint64_t *shape) {
    char whole[56];
    snprintf(whole, sizeof whole, "%u.%c.%s", side->layer, side->which ? 'v' : 'k', name);
    kv_tensor *tensor = kv_plan(file, whole, dtype, rank, shape);
    if (!side->tensors) side->tensors = tensor;
    side->tensor_count++;
    return tensor;
}

/* A stream of `rows` rows for every sequence and head, or for all heads together; the sizes end with a 0. */
static void add_rows(kv_file *file, kv_side *side, const char *name, kv_dtype dtype, uint64_t heads,
                     uint64_t rows, unsigned size, unsigned more) {
    uint64_t shape[] = {side->batch, heads, rows, size, more};
    add(file, side, name, dtype, 3 + (size > 0) + (more > 0), shape);
}

/* A stream of items, whose number is in `entries`. */
static void add_items(kv_file *file, kv_side *side, const char *name, kv_dtype dtype, uint64_t size,
                      uint64_t more) {
    kv_reader *r = file->reader;
    const kv_value *entries = side->entries;
    unsigned at = side->entry_count++;
    if (!entries || at >= entries->number || !kv_is(entries->items[2 * at].bytes, name) ||
        entries->items[2 * at + 1].type != V_INTEGER)
        kv_fail(r, INVALID_HEADER, "container-11", "entries does not give the items of %s in its place",
                name);
    uint64_t items = entries->items[2 * at + 1].number;
    if (items > 1099511627775u)
        kv_fail(r, LIMIT_EXCEEDED, "container-29", "%s has %llu items", name, (unsigned long long)items);
    uint64_t shape[] = {1, 1, items, size, more};
    add(file, side, name, dtype, 3 + (size > 0) + (more > 0), shape);
}

static void add_planes(kv_file *file, kv_side *side, unsigned packing) {
    const kv_packing *p = &side->codec->packings[packing];
    side->planes[packing] = side->tensor_count;
    for (unsigned plane = 0; plane < p->planes; plane++) {
        char name[32];
        bool half = p->bytes % 2 && plane == p->planes - 1;
        snprintf(name, sizeof name, "%s.%u", p->name, plane);
        add_rows(file, side, name, U16, side->heads, side->packed, half ? (p->columns + 1) / 2 : p->columns,
                 0);
    }
}

static void plan_cars(kv_file *file, kv_side *side) {
    const kv_codec *codec = side->codec;
    uint64_t heads = side->heads, packed = side->packed;
    unsigned dim = codec->dim;
    if (codec->cars & 1u << S_SCALE)
        add_rows(file, side, "channel_scale", codec->scale_dtype, heads, side->run_count, dim, 0);
    if (codec->cars & 1u << S_ORDER)
        add_rows(file, side, "channel_order", codec->order_dtype, heads, side->run_count, dim, 0);
    if (codec->cars & 1u << S_MEAN) {
        add_rows(file, side, "key_mean", U8, heads, side->groups, dim * codec->mean_bits / 8, 0);
        add_rows(file, side, "key_mean_scale", F16, heads, side->groups, 0, 0);
    }
    if (codec->cars & 1u << S_OUTLIERS) {
        add_planes(file, side, codec->outlier_packing);
        add_items(file, side, "outliers", F16, 4, 0);
    }
    if (codec->cars & 1u << S_QJL) {
        add_planes(file, side, codec->qjl_packing);
        add_rows(file, side, "qjl_norm", codec->qjl_dtype, heads, packed, 0, 0);
    }
    if (codec->cars & 1u << S_TOKENS) {
        add_rows(file, side, "raw_token_flags", U8, 1, packed, 0, 0);
        add_items(file, side, "raw_tokens", codec->tokens_dtype, heads, dim);
        side->tensors[side->tensor_count - 1].any = true;
    }
    if (codec->cars & 1u << S_POSITIONS) {
        add_items(file, side, "raw_positions", U16, 4, 0);
        add_items(file, side, "raw_values", codec->positions_dtype, heads, dim);
        side->tensors[side->tensor_count - 1].any = true;
    }
}

static void plan_codec(kv_file *file, kv_side *side) {
    const kv_codec *codec = side->codec;
    uint64_t heads = side->heads, packed = side->packed, runs = side->run_count, groups = side->groups;
    unsigned dim = codec->dim;
    const unsigned *choice = codec->choice;
    switch (codec->id) {
    case C_ANGLE:
        if (choice[0]) add_rows(file, side, "range", codec->dtype, heads, packed, 2, 0);
        else add_rows(file, side, "norm", F32, heads, packed, dim / 2, 0);
        break;
    case C_GROUP:
        if (choice[0])
            add_rows(file, side, "scales", choice[2] ? U8 : F16, heads, packed,
                     (dim + codec->size - 1) / codec->size, 2);
        else add_rows(file, side, "scales", choice[2] ? U8 : F16, heads, groups, dim, 2);
        if (choice[2]) add_rows(file, side, "scale_range", F16, heads, runs, 4, 0);
        if (choice[1])
            add_rows(file, side, "token_scale", choice[1] % 2 ? F16 : F32, choice[1] > 2 ? heads : 1, packed,
                     0, 0);
        break;
    case C_KLT:
        if (choice[3]) add_rows(file, side, "codes", U8, 1, packed, codec->bins, 0);
        if (choice[2]) add_rows(file, side, "gain", F16, heads, packed, 0, 0);
        if (choice[1])
            add_rows(file, side, "rows", choice[1] == 1 ? F16 : F32, heads, runs, kv_basis_vectors(dim), dim);
        break;
    case C_LOSSLESS:
        add_rows(file, side, "frequencies", U16, heads, runs, choice[0] ? 32 : 256, 0);
        add_rows(file, side, "states", U16, heads, groups, 64, 0);
        add_rows(file, side, "word_counts", U16, heads, groups, 0, 0);
        add_items(file, side, "words", U16, 0, 0);
        break;
    case C_MINIFLOAT:
        if (choice[1] < 3)
            add_rows(file, side, "scale", codec->dtype, choice[1] ? heads : 1, choice[1] == 2 ? packed : runs,
                     0, 0);
        else
            add_rows(file, side, "block_scales", U8, heads, packed,
                     choice[2] ? (dim + 15) / 16 : (dim + 31) / 32, 0);
        if (choice[1] == 3 && choice[2]) add_rows(file, side, "global_scale", F32, 1, runs, 0, 0);
        break;
    case C_OPAQUE: add_rows(file, side, "bytes", U8, heads, packed, dim, 0); break;
    case C_POLAR: add_rows(file, side, "radius", codec->dtype, heads, packed, codec->size, 0); break;
    case C_QUATERNION: add_rows(file, side, "scale", codec->dtype, heads, packed, 0, 0); break;
    case C_RAW:
        add_rows(file, side, "values", codec->dtype, heads, packed, dim, 0);
        side->tensors[side->tensor_count - 1].any = true;
        break;
    case C_TRANSFORM:
        if (!choice[0]) add_rows(file, side, "positions", U16, 1, groups, 2, 0);
        add_rows(file, side, "tokens", U16, 1, groups, 0, 0);
        add_rows(file, side, "columns", U16, heads, groups, 0, 0);
        add_rows(file, side, "states", U16, heads, groups, 64, 0);
        add_rows(file, side, "word_counts", U16, heads, groups, 2, 0);
        add_items(file, side, "words", U16, 0, 0);
        break;
    default: /* scalar, octahedral, trellis */ add_rows(file, side, "norm", codec->norm, heads, packed, 0, 0);
    }
}

void kv_plan_side(kv_file *file, kv_side *side) {
    const kv_codec *codec = side->codec;
    bool cars = codec->cars & 1u << S_OUTLIERS || codec->cars & 1u << S_QJL;
    unsigned own = codec->packing_count;
    if (cars) own = codec->cars & 1u << S_OUTLIERS ? codec->outlier_packing : codec->qjl_packing;
    for (unsigned i = 0; i < own; i++) add_planes(file, side, i);
    plan_codec(file, side);
    plan_cars(file, side);
    if (side->entries ? side->entries->number != side->entry_count || !side->entry_count
                      : side->entry_count > 0)
        kv_fail(file->reader, INVALID_HEADER, "container-11", "entries has a member too many");
    if (side->tail) {
        uint64_t shape[] = {side->batch, side->heads, side->tail, codec->dim};
        add(file, side, "tail", side->tail_dtype, 4, shape)->any = true;
    }
}

/* A stream by its name, which the side has. */
kv_tensor *kv_stream(const kv_side *side, const char *name) {
    for (unsigned i = 0; i < side->tensor_count; i++)
        if (!strcmp(strchr(side->tensors[i].name, '.') + 3, name)) return &side->tensors[i];
    return NULL;
}
