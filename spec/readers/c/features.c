/* Features with data, and what an ignorable feature says (container.md, from Token ids on). */
#include "kvpack.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define MAX_TOKENS 1099511627775u

bool kv_required(const kv_file *file, const char *name) {
    for (uint64_t i = 0; i < file->required->number; i++)
        if (kv_is(file->required->items[i].bytes, name)) return true;
    return false;
}

bool kv_feature(const kv_file *file, const char *name, kv_bytes *data) {
    for (uint64_t i = 0; i < file->ignorable->number; i++)
        if (kv_is(file->ignorable->items[2 * i].bytes, name)) {
            *data = file->ignorable->items[2 * i + 1].bytes;
            return true;
        }
    return false;
}

/* The data of a feature that has both a name and data, or neither. */
static bool with_data(kv_file *file, const char *name, const char *rule, kv_bytes *data) {
    bool has = kv_feature(file, name, data);
    if (has != kv_required(file, name))
        kv_fail(file->reader, INVALID_HEADER, rule, "the feature %s has a name or data, not both", name);
    return has;
}

static uint64_t tokens_of(const kv_layer *layer) {
    const kv_side *side = layer->sides[0] ? layer->sides[0] : layer->sides[1];
    return side ? side->packed + side->tail : 0;
}

static void read_starts(kv_file *file) {
    kv_reader *r = file->reader;
    kv_bytes data = {NULL, 0};
    bool has = with_data(file, "layer-positions", "container-35", &data), differs = false;
    if (has && data.size != 8 * (size_t)file->layer_count)
        kv_fail(r, INVALID_HEADER, "container-36", "layer-positions has %u bytes", (unsigned)data.size);
    file->end = file->start;
    for (unsigned l = 0; l < file->layer_count; l++) {
        kv_layer *layer = &file->layers[l];
        layer->start = has ? kv_little(data.data + 8 * l, 8) : file->start;
        if (layer->start > MAX_TOKENS)
            kv_fail(r, LIMIT_EXCEEDED, "container-29", "layer %u starts at %llu", l,
                    (unsigned long long)layer->start);
        if (layer->start < file->start)
            kv_fail(r, INVALID_HEADER, "container-37", "layer %u starts before the range", l);
        bool sides = layer->sides[0] || layer->sides[1];
        if (!sides && layer->start != file->start)
            kv_fail(r, INVALID_HEADER, "container-38", "layer %u has no sides and a start", l);
        differs = differs || layer->start != file->start;
        uint64_t end = layer->start + tokens_of(layer);
        file->end = sides && end > file->end ? end : file->end;
    }
    if (has && !differs) kv_fail(r, INVALID_HEADER, "container-39", "layer-positions has one start only");
}

static void read_record(kv_file *file, const uint8_t *record, kv_state *state) {
    kv_reader *r = file->reader;
    state->layer = (unsigned)kv_little(record, 2);
    kv_tensor *tensor = state->tensor = kv_take(r, 1, sizeof *tensor);
    unsigned dtype = record[2], rank = record[3], length = 0;
    bool right = dtype <= F32 && rank >= 1 && rank <= 8;
    tensor->dtype = (kv_dtype)dtype;
    tensor->rank = rank;
    for (unsigned i = 0; right && i < 8; i++) {
        uint64_t size = kv_little(record + 4 + 8 * i, 8);
        right = (size > 0) == (i < rank);
        tensor->shape[i] = size;
    }
    while (length < 28 && record[68 + length]) length++;
    for (unsigned i = 0; right && i < 28; i++) {
        char c = (char)record[68 + i];
        bool letter = c >= 'a' && c <= 'z', other = (c >= '0' && c <= '9') || c == '_' || c == '.';
        right = i < length ? letter || (i && other) : !c;
    }
    if (!right || !length)
        kv_fail(r, INVALID_HEADER, "container-43", "a record of layer-state has another form");
    memcpy(state->name, record + 68, length);
    for (unsigned i = 0; i < rank; i++)
        if (tensor->shape[i] > (i ? MAX_TOKENS : 65536))
            kv_fail(r, LIMIT_EXCEEDED, "container-29", "a size of the state %s is too large", state->name);
    if (state->layer >= file->layer_count)
        kv_fail(r, INVALID_HEADER, "container-44", "there is no layer %u", state->layer);
}

static void read_states(kv_file *file) {
    kv_reader *r = file->reader;
    kv_bytes data = {NULL, 0};
    if (!with_data(file, "layer-state", "container-41", &data)) return;
    if (!data.size || data.size % 96)
        kv_fail(r, INVALID_HEADER, "container-42", "layer-state has %u bytes", (unsigned)data.size);
    file->state_count = (unsigned)(data.size / 96);
    file->states = kv_take(r, file->state_count, sizeof *file->states);
    for (unsigned i = 0; i < file->state_count; i++) {
        kv_state *state = &file->states[i], *before = state - 1;
        read_record(file, data.data + 96 * i, state);
        bool same = i && before->layer == state->layer;
        if (i && (before->layer > state->layer || (same && strcmp(before->name, state->name) >= 0)))
            kv_fail(r, INVALID_HEADER, "container-45", "the records of layer-state do not ascend");
        kv_layer *layer = &file->layers[state->layer];
        bool wrong = same && before->tensor->shape[0] != state->tensor->shape[0];
        for (int which = 0; which < 2; which++)
            wrong = wrong || (layer->sides[which] && layer->sides[which]->batch != state->tensor->shape[0]);
        if (wrong)
            kv_fail(r, INVALID_HEADER, "container-46", "the states of layer %u differ in sequences",
                    state->layer);
    }
}

/* Whether every side and state has at least `low` and at most `high` sequences. */
static bool sequences_within(const kv_file *file, uint64_t low, uint64_t high) {
    bool right = true;
    for (unsigned l = 0; l < file->layer_count; l++)
        for (int which = 0; which < 2; which++)
            if (file->layers[l].sides[which]) {
                uint64_t batch = file->layers[l].sides[which]->batch;
                right = right && batch >= low && batch <= high;
            }
    for (unsigned i = 0; i < file->state_count; i++) {
        uint64_t batch = file->states[i].tensor->shape[0];
        right = right && batch >= low && batch <= high;
    }
    return right;
}

static void read_hidden(kv_file *file) {
    kv_reader *r = file->reader;
    kv_bytes data = {NULL, 0};
    if (!with_data(file, "hidden-tokens", "container-49", &data)) return;
    if (!data.size || data.size % 20)
        kv_fail(r, INVALID_HEADER, "container-50", "hidden-tokens has %u bytes", (unsigned)data.size);
    for (size_t at = 0; at < data.size; at += 20) {
        const uint8_t *record = data.data + at;
        uint64_t sequence = kv_little(record, 4), first = kv_little(record + 4, 8),
                 end = kv_little(record + 12, 8);
        if (!sequences_within(file, sequence + 1, UINT64_MAX))
            kv_fail(r, INVALID_HEADER, "container-51", "there is no sequence %u", (unsigned)sequence);
        if (first >= end || first < file->start || end > file->end)
            kv_fail(r, INVALID_HEADER, "container-52", "a stretch of hidden tokens is not within the range");
        if (at) {
            uint64_t last = kv_little(record - 20, 4), last_end = kv_little(record - 8, 8);
            if (last > sequence || (last == sequence && last_end >= first))
                kv_fail(r, INVALID_HEADER, "container-53", "the stretches of hidden tokens do not ascend");
        }
    }
}

static void read_offsets(kv_file *file) {
    kv_reader *r = file->reader;
    kv_bytes data = {NULL, 0};
    if (!with_data(file, "position-offsets", "container-56", &data)) return;
    if (!data.size || data.size % 8)
        kv_fail(r, INVALID_HEADER, "container-57", "position-offsets has %u bytes", (unsigned)data.size);
    if (!sequences_within(file, data.size / 8, data.size / 8))
        kv_fail(r, INVALID_HEADER, "container-58", "there are %u offsets", (unsigned)(data.size / 8));
    for (size_t at = 0; at < data.size; at += 8) {
        uint64_t offset = kv_little(data.data + at, 8), sum = file->end + offset;
        bool negative = offset >> 63;
        if (negative && 0 - offset > file->end)
            kv_fail(r, INVALID_HEADER, "container-59", "a position after the range is negative");
        if (!negative && (offset > MAX_TOKENS || sum > MAX_TOKENS))
            kv_fail(r, LIMIT_EXCEEDED, "container-29", "a position after the range is too large");
        if (negative && sum > MAX_TOKENS)
            kv_fail(r, LIMIT_EXCEEDED, "container-29", "a position after the range is too large");
    }
}

/* The sequences of the side or state that has the fewest; 0 without both. */
static unsigned fewest_sequences(const kv_file *file) {
    unsigned fewest = UINT_MAX;
    for (unsigned s = 0; s < file->state_count; s++) {
        unsigned own = (unsigned)file->states[s].tensor->shape[0];
        fewest = own < fewest ? own : fewest;
    }
    for (unsigned l = 0; l < file->layer_count; l++)
        for (int which = 0; which < 2; which++) {
            const kv_side *side = file->layers[l].sides[which];
            if (side && side->batch < fewest) fewest = (unsigned)side->batch;
        }
    return fewest == UINT_MAX ? 0 : fewest;
}

void kv_read_features(kv_file *file) {
    kv_bytes data = {NULL, 0};
    read_starts(file);
    read_states(file);
    read_hidden(file);
    read_offsets(file);
    file->checksums = kv_feature(file, "zstd-checksum", &data);
    file->sequences = fewest_sequences(file);
}

/* The data of features NAME.0, NAME.1 and so on, joined; false without the first. */
static bool joined(kv_file *file, const char *name, kv_bytes *found) {
    char key[40];
    kv_bytes part;
    size_t size = 0;
    unsigned count = 0;
    for (;; count++) {
        snprintf(key, sizeof key, "%s.%u", name, count);
        if (!kv_feature(file, key, &part)) break;
        size += part.size;
    }
    uint8_t *data = kv_take(file->reader, size, 1);
    *found = (kv_bytes){data, size};
    for (unsigned i = 0; i < count; i++) {
        snprintf(key, sizeof key, "%s.%u", name, i);
        kv_feature(file, key, &part);
        if (part.size) memcpy(data, part.data, part.size);
        data += part.size;
    }
    return count > 0;
}

/* The ids of `inputs`, and what ids do not determine as JSON; false if the data have another form. */
static bool read_inputs(kv_bytes data, kv_bytes *ids, kv_text *text) {
    if (data.size < 8) return false;
    uint64_t count = kv_little(data.data, 8);
    if (count > (data.size - 8) / 4) return false;
    *ids = (kv_bytes){data.data + 8, (size_t)(4 * count)};
    size_t at = 8 + ids->size;
    kv_put(text, "[");
    for (bool more = false; at < data.size; more = true) {
        if (data.size - at < 12) return false;
        uint64_t position = kv_little(data.data + at, 8), size = kv_little(data.data + at + 8, 4);
        kv_bytes string = {data.data + at + 12, (size_t)size};
        if (!size || size > data.size - at - 12 || !kv_utf8(string)) return false;
        kv_put(text, "%s[\"%llu\",", more ? "," : "", (unsigned long long)position);
        kv_put_json(text, string);
        kv_put(text, "]");
        at += 12 + (size_t)size;
    }
    kv_put(text, "]");
    return true;
}

static void put_digest(kv_text *text, const uint8_t *data, size_t size) {
    uint8_t digest[32];
    kv_sha256(data, size, digest);
    kv_put(text, "\"");
    for (int i = 0; i < 32; i++) kv_put(text, "%02x", digest[i]);
    kv_put(text, "\"");
}

static void put_token_ids(kv_file *file, kv_text *text) {
    kv_reader *r = file->reader;
    kv_bytes data, ids = {NULL, 0}, tokens, rows;
    bool known = kv_feature(file, "inputs", &data);
    if (known) {
        kv_text inputs = {r, NULL, 0, 0};
        bool right = read_inputs(data, &ids, &inputs);
        if (!right) ids.size = 0;
        kv_put(text, ",\"undetermined\":%s", right ? inputs.data : "null");
    }
    if (joined(file, "token-ids", &tokens)) {
        known = true;
        if (tokens.size % 4 == 0 && tokens.size >= ids.size &&
            (!ids.size || !memcmp(tokens.data, ids.data, ids.size)))
            ids = tokens;
    }
    uint64_t shared = ids.size / 4, own = 0, length = file->end - file->start;
    if (joined(file, "row-ids", &rows)) {
        known = true;
        uint64_t sequences = rows.size < 12 ? 0 : kv_little(rows.data, 4);
        own = rows.size < 12 ? 0 : kv_little(rows.data + 4, 8);
        if (sequences != file->sequences || kv_times(kv_times(own, sequences), 4) != rows.size - 12) own = 0;
    }
    if (!known) return;
    uint64_t from_shared = shared < length ? shared : length;
    uint64_t from_own = own < length - from_shared ? own : length - from_shared;
    uint64_t each = 4 * (from_shared + from_own);
    uint8_t *all = kv_take(r, kv_times(file->sequences, each), 1);
    for (uint64_t s = 0; s < file->sequences; s++) {
        if (from_shared) memcpy(all + s * each, ids.data, (size_t)(4 * from_shared));
        if (from_own)
            memcpy(all + s * each + 4 * from_shared, rows.data + 12 + 4 * own * s, (size_t)(4 * from_own));
    }
    kv_put(text, ",\"token_ids_sha256\":");
    put_digest(text, all, (size_t)(file->sequences * each));
}

/* Metadata as JSON; false if the data have another form. */
static bool read_metadata(kv_bytes data, kv_text *text) {
    kv_bytes last = {NULL, 0};
    size_t at = 0;
    unsigned count = 0;
    kv_put(text, "[");
    for (; at < data.size; count++) {
        size_t length = data.data[at], left = data.size - at - 1;
        kv_bytes name = {data.data + at + 1, length};
        if (!length || left < length + 5 || !kv_utf8(name) || (count && kv_compare(last, name) >= 0) ||
            count == 256)
            return false;
        last = name;
        at += 1 + length;
        uint8_t type = data.data[at++];
        kv_put(text, count ? ",[" : "[");
        kv_put_json(text, name);
        uint64_t size = type ? 8 : 4 + kv_little(data.data + at, 4);
        if (type > 2 || size > 4100 || size > data.size - at) return false;
        const uint8_t *value = data.data + at;
        uint64_t number = type ? kv_little(value, 8) : 0;
        kv_bytes string = {value + 4, (size_t)size - 4};
        if ((type == 2 && (number >> 52 & 2047) == 2047) || (type == 0 && !kv_utf8(string))) return false;
        static const char *const names[] = {"text", "integer", "number"};
        kv_put(text, ",\"%s\",", names[type]);
        if (type == 0) kv_put_json(text, string);
        else if (type == 1)
            kv_put(text, "\"%s%llu\"", number >> 63 ? "-" : "",
                   (unsigned long long)(number >> 63 ? 0 - number : number));
        else kv_put(text, "\"%016llx\"", (unsigned long long)number);
        kv_put(text, "]");
        at += (size_t)size;
    }
    kv_put(text, "]");
    return true;
}

/* What a file says beside its values, as JSON in the form of the manifest of vectors. */
void kv_write_facts(kv_file *file, kv_text *text) {
    kv_bytes data = {NULL, 0};
    kv_put(text, "{\"starts\":[");
    for (unsigned l = 0; l < file->layer_count; l++)
        kv_put(text, "%s%llu", l ? "," : "", (unsigned long long)file->layers[l].start);
    kv_put(text, "]");
    if (kv_feature(file, "position-offsets", &data)) {
        for (size_t at = 0; at < data.size; at += 8) {
            uint64_t offset = kv_little(data.data + at, 8);
            kv_put(text, "%s%s%llu", at ? "," : ",\"offsets\":[", offset >> 63 ? "-" : "",
                   (unsigned long long)(offset >> 63 ? 0 - offset : offset));
        }
        kv_put(text, "]");
    }
    if (kv_feature(file, "hidden-tokens", &data)) {
        for (size_t at = 0; at < data.size; at += 20)
            kv_put(text, "%s[%llu,%llu,%llu]", at ? "," : ",\"hidden\":[",
                   (unsigned long long)kv_little(data.data + at, 4),
                   (unsigned long long)kv_little(data.data + at + 4, 8),
                   (unsigned long long)kv_little(data.data + at + 12, 8));
        kv_put(text, "]");
    }
    for (unsigned i = 0; i < file->state_count; i++) {
        kv_put(text, "%s\"%s\":", i ? "," : ",\"states\":{", file->states[i].tensor->name);
        put_digest(text, file->states[i].tensor->data, (size_t)file->states[i].tensor->bytes);
    }
    if (file->state_count) kv_put(text, "}");
    if (kv_feature(file, "metadata", &data)) {
        kv_text entries = {file->reader, NULL, 0, 0};
        kv_put(text, ",\"metadata_entries\":%s", read_metadata(data, &entries) ? entries.data : "[]");
    }
    put_token_ids(file, text);
    kv_put(text, "}");
}
