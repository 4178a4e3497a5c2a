/* The msgpack profile of headers (container.md), and the search for what is new in a header. */
#include "kvpack.h"

#include <string.h>

typedef struct {
    kv_reader *reader;
    const uint8_t *at, *end;
} parser;

static uint64_t big(const uint8_t *bytes, int count) {
    uint64_t number = 0;
    for (int i = 0; i < count; i++) number = number << 8 | bytes[i];
    return number;
}

static _Noreturn void refuse(parser *p, const char *why) {
    kv_fail(p->reader, INVALID_HEADER, "container-10", "%s", why);
}

/* A number of `count` bytes, which must be at least `least` to have its shortest form. */
static uint64_t number(parser *p, int count, uint64_t least) {
    if (p->end - p->at < count) refuse(p, "the header is cut short");
    uint64_t found = big(p->at, count);
    p->at += count;
    if (found < least) refuse(p, "a number of the header does not have its shortest form");
    return found;
}

static kv_bytes take(parser *p, uint64_t size, uint64_t limit) {
    if (size > limit)
        kv_fail(p->reader, LIMIT_EXCEEDED, "container-29", "a string or binary value has %llu bytes",
                (unsigned long long)size);
    if ((uint64_t)(p->end - p->at) < size) refuse(p, "the header is cut short");
    kv_bytes bytes = {p->at, (size_t)size};
    p->at += size;
    return bytes;
}

static void parse(parser *p, kv_value *value, int open);

static void parse_items(parser *p, kv_value *value, int open) {
    bool map = value->type == V_MAP;
    if (value->number > (map ? 256u : 131072u))
        kv_fail(p->reader, LIMIT_EXCEEDED, "container-29", "an array or map has %llu elements",
                (unsigned long long)value->number);
    if (open == 5) refuse(p, "more than five maps and arrays are open");
    uint64_t count = value->number * (map ? 2 : 1);
    if (count > (uint64_t)(p->end - p->at)) refuse(p, "the header is cut short");
    value->items = kv_take(p->reader, count, sizeof *value);
    for (uint64_t i = 0; i < count; i++) {
        parse(p, &value->items[i], open + 1);
        if (map && i % 2 == 0 && value->items[i].type != V_STRING) refuse(p, "a map key is not a string");
    }
}

static void parse(parser *p, kv_value *value, int open) {
    uint8_t head = (uint8_t)number(p, 1, 0);
    if (head < 0x80 || (head >= 0xcc && head <= 0xcf)) {
        static const uint64_t least[] = {0x80, 0x100, 0x10000, 0x100000000};
        value->type = V_INTEGER;
        value->number = head < 0x80 ? head : number(p, 1 << (head - 0xcc), least[head - 0xcc]);
    } else if (head < 0x90 || head == 0xde || head == 0xdf) {
        value->type = V_MAP;
        value->number = head < 0x90 ? head & 15u : head == 0xde ? number(p, 2, 16) : number(p, 4, 0x10000);
        parse_items(p, value, open);
    } else if (head < 0xa0 || head == 0xdc || head == 0xdd) {
        value->type = V_ARRAY;
        value->number = head < 0xa0 ? head & 15u : head == 0xdc ? number(p, 2, 16) : number(p, 4, 0x10000);
        parse_items(p, value, open);
    } else if (head < 0xc0 || (head >= 0xd9 && head <= 0xdb)) {
        static const uint64_t least[] = {32, 0x100, 0x10000};
        value->type = V_STRING;
        uint64_t size = head < 0xc0 ? head & 31u : number(p, 1 << (head - 0xd9), least[head - 0xd9]);
        value->bytes = take(p, size, 4096);
        if (!kv_utf8(value->bytes)) refuse(p, "a string is not UTF-8");
    } else if (head >= 0xc4 && head <= 0xc6) {
        static const uint64_t least[] = {0, 0x100, 0x10000};
        value->type = V_BINARY;
        value->bytes = take(p, number(p, 1 << (head - 0xc4), least[head - 0xc4]), 65536);
    } else if (head == 0xc0) {
        value->type = V_NIL;
    } else {
        refuse(p, "a type of msgpack does not occur in headers");
    }
}

kv_value *kv_parse(kv_reader *reader, kv_bytes bytes) {
    parser p = {reader, bytes.data, bytes.data + bytes.size};
    kv_value *value = kv_take(reader, 1, sizeof *value);
    parse(&p, value, 0);
    if (p.at != p.end) refuse(&p, "bytes follow the header");
    return value;
}

/* The head of a value in any form of msgpack: `items` values follow it, or `size` bytes. */
typedef struct {
    enum { L_OTHER, L_INTEGER, L_STRING, L_ARRAY, L_MAP } type;
    uint64_t items, size, number;
    const uint8_t *bytes;
} loose;

/* Read a head and its bytes; false if the bytes are cut short. */
static bool read_loose(const uint8_t **at, const uint8_t *end, loose *found) {
    *found = (loose){L_OTHER, 0, 0, 0, NULL};
    if (*at == end) return false;
    uint8_t head = *(*at)++;
    int wide = 0;
    if (head < 0x80) {
        found->type = L_INTEGER;
        found->number = head;
    } else if (head < 0xa0) {
        found->type = head < 0x90 ? L_MAP : L_ARRAY;
        found->items = head & 15u;
    } else if (head < 0xc0) {
        found->type = L_STRING;
        found->size = head & 31u;
    } else if (head >= 0xcc && head <= 0xd3) {
        wide = 1 << (head & 3);
        found->type = L_INTEGER;
    } else if (head >= 0xd9) {
        wide = head < 0xdc ? 1 << (head - 0xd9) : head < 0xe0 ? 2 << (head & 1) : 0;
        found->type = head < 0xdc ? L_STRING : head < 0xde ? L_ARRAY : head < 0xe0 ? L_MAP : L_OTHER;
    } else if (head >= 0xc4 && head <= 0xc9) {
        wide = 1 << ((head - 0xc4) % 3);
    } else if (head == 0xca || head == 0xcb) {
        found->size = head == 0xca ? 4 : 8;
    } else if (head >= 0xd4) {
        found->size = 1 + (1u << (head - 0xd4));
    }
    if (end - *at < wide) return false;
    uint64_t number = big(*at, wide);
    *at += wide;
    if (head >= 0xcc && head <= 0xcf) found->number = number;
    else if (head >= 0xd9 && head < 0xdc) found->size = number;
    else if (head >= 0xdc && head < 0xe0) found->items = number;
    else if (head >= 0xc4 && head <= 0xc9) found->size = number + (head >= 0xc7);
    else if (head >= 0xd0 && head <= 0xd3) found->number = number >> (8 * wide - 1) ? 0 : number;
    found->bytes = *at;
    if ((uint64_t)(end - *at) < found->size) return false;
    *at += found->size;
    return true;
}

/* Skip the values that follow a head. */
static bool skip_items(const uint8_t **at, const uint8_t *end, loose head) {
    uint64_t left = head.items * (head.type == L_MAP ? 2 : 1);
    while (left) {
        if (!read_loose(at, end, &head)) return false;
        left = left - 1 + head.items * (head.type == L_MAP ? 2 : 1);
    }
    return true;
}

static bool loose_is(loose found, const char *text) {
    return found.type == L_STRING && kv_is((kv_bytes){found.bytes, (size_t)found.size}, text);
}

static const char *const known_features[] = {
    "balanced",    "basis",     "hidden-tokens",    "key-mean",      "layer-positions",
    "layer-state", "log-norms", "position-offsets", "raw-positions", "token-scale-per-head"};

static void look_at_required(kv_reader *reader, const uint8_t *at, const uint8_t *end, uint64_t count) {
    for (loose item; count && read_loose(&at, end, &item); count--) {
        bool known = item.type != L_STRING;
        for (size_t i = 0; i < sizeof known_features / sizeof *known_features; i++)
            known = known || loose_is(item, known_features[i]);
        if (!known)
            kv_fail(reader, UNSUPPORTED_VERSION, "container-7", "the file needs the feature %.*s",
                    item.size < 100 ? (int)item.size : 100, (const char *)item.bytes);
        if (!skip_items(&at, end, item)) return;
    }
}

static void look_at_codecs(kv_reader *reader, const uint8_t *at, const uint8_t *end, uint64_t count) {
    for (loose codec; count && read_loose(&at, end, &codec); count--) {
        const uint8_t *start = at;
        if (!skip_items(&at, end, codec)) return;
        for (uint64_t left = codec.type == L_MAP ? codec.items : 0; left; left--) {
            loose key, id;
            read_loose(&start, at, &key);
            bool found = loose_is(key, "id");
            skip_items(&start, at, key);
            read_loose(&start, at, &id);
            bool known = !found || id.type != L_STRING;
            for (int i = 0; i < CODECS; i++)
                known = known || (i != C_OPAQUE && loose_is(id, kv_codec_names[i]));
            if (!known)
                kv_fail(reader, UNKNOWN_CODEC, "container-12", "the codec %.*s is not known",
                        id.size < 100 ? (int)id.size : 100, (const char *)id.bytes);
            if (found) break;
            skip_items(&start, at, id);
        }
    }
}

/* Refuse what a later version wrote, before anything else that may be wrong (rule container-69). */
void kv_look_for_new(kv_reader *reader, kv_bytes bytes) {
    const uint8_t *at = bytes.data, *end = at + bytes.size;
    const uint8_t *places[3] = {NULL, NULL, NULL};
    loose map, key, found[3] = {{0}};
    static const char *const names[] = {"format", "required", "codecs"};
    if (!read_loose(&at, end, &map) || map.type != L_MAP) return;
    for (uint64_t left = map.items; left; left--) {
        if (!read_loose(&at, end, &key) || !skip_items(&at, end, key)) break;
        loose value;
        if (!read_loose(&at, end, &value)) break;
        for (int i = 0; i < 3; i++)
            if (!places[i] && loose_is(key, names[i])) {
                places[i] = at;
                found[i] = value;
            }
        if (!skip_items(&at, end, value)) break;
    }
    if (places[0] && found[0].type == L_INTEGER && found[0].number > 1)
        kv_fail(reader, UNSUPPORTED_VERSION, "container-32", "a later version, %llu, wrote the file",
                (unsigned long long)found[0].number);
    if (places[1] && found[1].type == L_ARRAY) look_at_required(reader, places[1], end, found[1].items);
    if (places[2] && found[2].type == L_ARRAY) look_at_codecs(reader, places[2], end, found[2].items);
}
