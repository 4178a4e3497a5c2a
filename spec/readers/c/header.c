/* The fields of the header, and the plan of tensors that follows from them (container.md, Fields). */
#include "kvpack.h"

#include <stdio.h>
#include <string.h>

#define MAX_TOKENS 1099511627775u

static _Noreturn void too_large(kv_reader *r, const char *what, uint64_t number) {
    kv_fail(r, LIMIT_EXCEEDED, "container-29", "%s is %llu", what, (unsigned long long)number);
}

/* An integer with a limit of container.md. */
static uint64_t limited(kv_cursor *c, const char *key, uint64_t low, uint64_t limit) {
    uint64_t number = kv_integer(c, key, low, UINT64_MAX);
    if (number > limit) too_large(c->reader, key, number);
    return number;
}

/* Members must ascend, which is why none occurs twice. */
static kv_value *ascending(kv_cursor *c, const char *key, kv_type type) {
    kv_value *map = &c->map->items[2 * c->at + 1];
    kv_next(c, key, V_MAP);
    for (uint64_t i = 0; i < map->number; i++) {
        if (map->items[2 * i + 1].type != type)
            kv_fail(c->reader, INVALID_HEADER, "container-11", "a member of %s has another type", key);
        if (i && kv_compare(map->items[2 * i - 2].bytes, map->items[2 * i].bytes) >= 0)
            kv_fail(c->reader, INVALID_HEADER, "container-10", "the members of %s do not ascend", key);
    }
    return map;
}

static void read_runs(kv_cursor *c, kv_side *side) {
    const kv_value *runs = kv_next(c, "runs", V_ARRAY);
    side->run_count = runs->number;
    side->runs = kv_take(c->reader, runs->number, sizeof *side->runs);
    for (uint64_t i = 0; i < runs->number; i++) {
        uint64_t run = runs->items[i].number;
        if (runs->items[i].type != V_INTEGER || !run)
            kv_fail(c->reader, INVALID_HEADER, "container-11", "a run is not an integer from 1 on");
        side->runs[i] = run;
        side->packed = kv_plus(side->packed, run);
        side->groups = kv_plus(side->groups, run / side->codec->group + (run % side->codec->group > 0));
    }
}

static kv_side *read_side(kv_file *file, const kv_value *map, unsigned layer, unsigned which) {
    static const char *const dtypes[] = {"bf16", "fp16", "fp32", NULL};
    static const kv_dtype tails[] = {BF16, F16, F32};
    kv_reader *r = file->reader;
    kv_side *side = kv_take(r, 1, sizeof *side);
    kv_cursor c = {r, map, 0, "container-11", "container-11"};
    side->layer = layer;
    side->which = which;
    uint64_t codec = kv_integer(&c, "codec", 0, UINT64_MAX);
    if (codec >= file->codec_count)
        kv_fail(r, INVALID_HEADER, "container-11", "there is no codec %llu", (unsigned long long)codec);
    side->codec = &file->codecs[codec];
    side->batch = limited(&c, "batch", 1, 65536);
    side->heads = limited(&c, "heads", 1, 65536);
    read_runs(&c, side);
    side->tail = limited(&c, "tail", 0, MAX_TOKENS);
    if (kv_plus(side->packed, side->tail) > MAX_TOKENS)
        too_large(r, "the number of tokens", kv_plus(side->packed, side->tail));
    side->tail_dtype = tails[kv_choice(&c, "tail_dtype", dtypes)];
    side->window = limited(&c, "window", 0, MAX_TOKENS);
    if (side->window % side->codec->group)
        kv_fail(r, INVALID_HEADER, "container-15", "window is not a multiple of the token group");
    if (kv_key_is(&c, "entries")) {
        side->entries = &map->items[2 * c.at + 1];
        kv_next(&c, "entries", V_MAP);
    }
    kv_end(&c);
    if (side->run_count > 1 && side->codec->group == 1 && !kv_rows_per_run(side->codec))
        kv_fail(r, INVALID_HEADER, "container-18", "a codec that encodes tokens one by one has several runs");
    if (which && side->codec->cars & 1u << S_MEAN)
        kv_fail(r, INVALID_HEADER, "side-cars-14", "values have key_mean");
    if (side->codec->id == C_KLT && side->codec->choice[3] && side->heads != side->codec->step)
        kv_fail(r, INVALID_HEADER, "klt-10", "there are widths for %u heads", side->codec->step);
    return side;
}

static void read_layers(kv_file *file, kv_cursor *c) {
    kv_reader *r = file->reader;
    const kv_value *layers = kv_next(c, "layers", V_ARRAY);
    if (layers->number > 4096) too_large(r, "the number of layers", layers->number);
    file->layer_count = (unsigned)layers->number;
    file->layers = kv_take(r, layers->number, sizeof *file->layers);
    for (unsigned l = 0; l < file->layer_count; l++) {
        static const char *const names[] = {"k", "v"};
        if (layers->items[l].type != V_MAP)
            kv_fail(r, INVALID_HEADER, "container-11", "layer %u is not a map", l);
        kv_cursor sides = {r, &layers->items[l], 0, "container-11", "container-11"};
        for (unsigned which = 0; which < 2; which++) {
            bool nil = kv_key_is(&sides, names[which]) && sides.map->items[2 * sides.at + 1].type == V_NIL;
            const kv_value *map = kv_next(&sides, names[which], nil ? V_NIL : V_MAP);
            file->layers[l].sides[which] = nil ? NULL : read_side(file, map, l, which);
        }
        kv_end(&sides);
        kv_side *k = file->layers[l].sides[0], *v = file->layers[l].sides[1];
        if (k && v && k->batch != v->batch)
            kv_fail(r, INVALID_HEADER, "container-13", "the sides of layer %u differ in batch", l);
        if (k && v && k->packed + k->tail != v->packed + v->tail)
            kv_fail(r, INVALID_HEADER, "container-14", "the sides of layer %u differ in tokens", l);
    }
}

static void read_required(kv_file *file, kv_cursor *c) {
    kv_value *required = &c->map->items[2 * c->at + 1];
    kv_next(c, "required", V_ARRAY);
    if (required->number > 256) too_large(file->reader, "the number of required features", required->number);
    for (uint64_t i = 0; i < required->number; i++) {
        if (required->items[i].type != V_STRING)
            kv_fail(file->reader, INVALID_HEADER, "container-11", "a required feature is not a string");
        if (i && kv_compare(required->items[i - 1].bytes, required->items[i].bytes) >= 0)
            kv_fail(file->reader, INVALID_HEADER, "container-34", "required features do not ascend");
    }
    file->required = required;
}

/* Features that a file needs exactly if a codec has something. */
static void check_codec_features(kv_file *file) {
    bool found[5] = {false};
    static const struct {
        const char *name, *rule;
    } features[] = {{"balanced", "container-63"},
                    {"key-mean", "container-62"},
                    {"log-norms", "container-64"},
                    {"raw-positions", "container-55"},
                    {"token-scale-per-head", "container-61"}};
    for (unsigned i = 0; i < file->codec_count; i++) {
        const kv_codec *codec = &file->codecs[i];
        bool norm = codec->id == C_SCALAR || codec->id == C_OCTAHEDRAL || codec->id == C_TRELLIS;
        found[0] |= codec->cars >> S_BALANCED & 1;
        found[1] |= codec->cars >> S_MEAN & 1;
        found[2] |= norm && codec->norm == U8;
        found[3] |= codec->cars >> S_POSITIONS & 1;
        found[4] |= codec->id == C_GROUP && codec->choice[1] > 2;
    }
    for (int i = 0; i < 5; i++)
        if (kv_required(file, features[i].name) != found[i])
            kv_fail(file->reader, INVALID_HEADER, features[i].rule, "the feature %s is %s", features[i].name,
                    found[i] ? "missing" : "named without need");
}

void kv_plan_all(kv_file *file) {
    kv_reader *r = file->reader;
    file->tensors = kv_take(r, r->page ? 2 * MAX_STREAMS * file->layer_count : file->listed->number,
                            sizeof *file->tensors);
    unsigned state = 0;
    for (unsigned l = 0; l < file->layer_count; l++) {
        for (int which = 0; which < 2; which++)
            if (file->layers[l].sides[which]) kv_plan_side(file, file->layers[l].sides[which]);
        for (; state < file->state_count && file->states[state].layer == l; state++) {
            kv_state *s = &file->states[state];
            char name[56];
            snprintf(name, sizeof name, "%u.state.%s", l, s->name);
            kv_tensor *planned = s->tensor;
            s->tensor = kv_plan(file, name, planned->dtype, planned->rank, planned->shape);
            s->tensor->any = true;
        }
    }
    if (!r->page && file->tensor_count != file->listed->number)
        kv_fail(r, INVALID_HEADER, "container-16", "there are %llu tensors, not %llu",
                (unsigned long long)file->tensor_count, (unsigned long long)file->listed->number);
}

void kv_read_header(kv_file *file, kv_value *map) {
    kv_reader *r = file->reader;
    if (map->type != V_MAP) kv_fail(r, INVALID_HEADER, "container-11", "the header is not a map");
    kv_cursor c = {r, map, 0, "container-11", "container-11"};
    kv_integer(&c, "format", 1, 1);
    read_required(file, &c);
    file->ignorable = ascending(&c, "ignorable", V_BINARY);
    kv_value *model = ascending(&c, "model", V_STRING);
    kv_next(&c, "recipe", V_STRING);
    file->start = limited(&c, "start", 0, MAX_TOKENS);
    const kv_value *codecs = kv_next(&c, "codecs", V_ARRAY);
    if (codecs->number > 4096) too_large(r, "the number of codecs", codecs->number);
    file->codec_count = (unsigned)codecs->number;
    file->codecs = kv_take(r, codecs->number, sizeof *file->codecs);
    for (unsigned i = 0; i < file->codec_count; i++) {
        if (codecs->items[i].type != V_MAP)
            kv_fail(r, INVALID_HEADER, "container-11", "codec %u is not a map", i);
        kv_read_codec(r, &codecs->items[i], &file->codecs[i]);
    }
    read_layers(file, &c);
    file->listed = &map->items[2 * c.at + 1];
    kv_next(&c, "tensors", V_ARRAY);
    kv_end(&c);
    if (r->page && (model->number || file->start || file->listed->number))
        kv_fail(r, INVALID_HEADER, "row-3", "a description has a model, a start or tensors");
    check_codec_features(file);
    kv_read_features(file);
    if (r->page) return;
    kv_plan_all(file);
    file->basis = kv_required(file, "basis");
    if (file->basis) kv_check_basis_header(file);
}
