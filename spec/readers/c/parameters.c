/* The parameters of codecs and side-cars in the header, by the tables of their documents. */
#include "kvpack.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

const char *const kv_codec_names[] = {"angle",      "group",     "klt",    "lossless",   "minifloat",
                                      "octahedral", "opaque",    "polar",  "quaternion", "raw",
                                      "scalar",     "transform", "trellis"};

static const char *const none_to_signed[] = {"none", "hadamard", "signed-hadamard", NULL};
static const char *const arrangements[] = {"dense", "direct", NULL};
static const char *const halves_and_singles[] = {"fp16", "fp32", NULL};
static const char *const floats[] = {"bf16", "fp16", "fp32", NULL};
static const char *const norms[] = {"fp16", "fp32", "log8", NULL};
static const kv_dtype float_dtypes[] = {BF16, F16, F32}, norm_dtypes[] = {F16, F32, U8};

bool kv_key_is(const kv_cursor *c, const char *key) {
    return c->at < c->map->number && kv_is(c->map->items[2 * c->at].bytes, key);
}

const kv_value *kv_next(kv_cursor *c, const char *key, kv_type type) {
    if (!kv_key_is(c, key))
        kv_fail(c->reader, INVALID_HEADER, c->keys, "the map key %s is missing or not in its place", key);
    const kv_value *value = &c->map->items[2 * c->at++ + 1];
    if (value->type != type) kv_fail(c->reader, INVALID_HEADER, c->values, "%s has another type", key);
    return value;
}

uint64_t kv_integer(kv_cursor *c, const char *key, uint64_t low, uint64_t high) {
    uint64_t number = kv_next(c, key, V_INTEGER)->number;
    if (number < low || number > high)
        kv_fail(c->reader, INVALID_HEADER, c->values, "%s is %llu", key, (unsigned long long)number);
    return number;
}

unsigned kv_choice(kv_cursor *c, const char *key, const char *const *choices) {
    kv_bytes text = kv_next(c, key, V_STRING)->bytes;
    for (unsigned i = 0; choices[i]; i++)
        if (kv_is(text, choices[i])) return i;
    kv_fail(c->reader, INVALID_HEADER, c->values, "%s has a value that does not exist", key);
}

/* Bytes of a given length. */
kv_bytes kv_binary(kv_cursor *c, const char *key, uint64_t size) {
    kv_bytes bytes = kv_next(c, key, V_BINARY)->bytes;
    if (bytes.size != size)
        kv_fail(c->reader, INVALID_HEADER, c->values, "%s has %llu bytes, not %llu", key,
                (unsigned long long)bytes.size, (unsigned long long)size);
    return bytes;
}

void kv_end(kv_cursor *c) {
    if (c->at != c->map->number) kv_fail(c->reader, INVALID_HEADER, c->keys, "a map has a map key too many");
}

static void set(unsigned *number, kv_cursor *c, const char *key, uint64_t low, uint64_t high) {
    *number = (unsigned)kv_integer(c, key, low, high);
}

/* Add a code stream of one digit, or of two. */
static void add(kv_codec *codec, const char *name, uint64_t symbols, uint64_t base, uint64_t alphabet) {
    kv_packing *p = &codec->packings[codec->packing_count++];
    snprintf(p->name, sizeof p->name, "%s", name);
    p->symbols = (unsigned)symbols;
    p->digits = 1;
    p->base[0] = (unsigned)base;
    p->alphabet[0] = (unsigned)alphabet;
}

static void add_digit(kv_codec *codec, uint64_t base) {
    kv_packing *p = &codec->packings[codec->packing_count - 1];
    p->digits = 2;
    p->base[1] = p->alphabet[1] = (unsigned)base;
}

static void set_fields(kv_reader *reader, kv_packing *p, uint64_t fields) {
    p->fields = fields > 128 ? 0 : (unsigned)fields;
    if (!kv_pack_sizes(p))
        kv_fail(reader, INVALID_HEADER, "front-5", "%llu fields of %s exceed a limit of packing",
                (unsigned long long)fields, p->name);
}

/* The map `fields`: F of the code streams so far. */
static void read_fields(kv_cursor *c, kv_codec *codec, const char *rule) {
    kv_cursor fields = {c->reader, kv_next(c, "fields", V_MAP), 0, rule, c->values};
    for (unsigned i = 0; i < codec->packing_count; i++) {
        const char *name = codec->packings[i].name;
        set_fields(c->reader, &codec->packings[i], kv_next(&fields, name, V_INTEGER)->number);
    }
    kv_end(&fields);
}

static void read_rotation(kv_cursor *c, kv_codec *codec) {
    codec->rotation = kv_choice(c, "rotation_kind", none_to_signed);
    codec->seed = codec->rotation_seed = kv_integer(c, "seed", 0, UINT64_MAX);
}

/* A table of binary32 numbers that must be in [0, high] and strictly ascending. */
static void check_table(kv_cursor *c, kv_bytes table, float high, const char *rule) {
    float last = -1;
    for (size_t i = 0; i < table.size / 4; i++) {
        float number = kv_number(F32, table.data, i);
        if (!(number >= 0 && number <= high && number > last))
            kv_fail(c->reader, INVALID_HEADER, rule, "number %u of a table is out of range or order",
                    (unsigned)i);
        last = number;
    }
}

static uint64_t power_above(uint64_t number) {
    uint64_t power = 1;
    while (power < number) power *= 2;
    return power;
}

static void read_angle(kv_cursor *c, kv_codec *codec) {
    static const char *const kinds[] = {"fp32", "linear", "log", NULL};
    set(&codec->bins, c, "bins", 2, 65536);
    unsigned kind = codec->choice[0] = kv_choice(c, "norm", kinds);
    set(&codec->bits, c, "norm_bits", kind ? 1 : 0, kind ? 8 : 0);
    bool direct = kv_choice(c, "arrangement", arrangements);
    codec->choice[1] = direct;
    unsigned range = kv_choice(c, "range", halves_and_singles);
    codec->dtype = range ? F32 : F16;
    if (codec->dim % 2 || (!kind && (direct || range)))
        kv_fail(c->reader, INVALID_HEADER, c->values, "dim is odd, or norms of fp32 have a range or symbols");
    read_rotation(c, codec);
    unsigned n = codec->dim / 2, bins = codec->bins, low = bins & (0 - bins), high = bins / low;
    uint64_t base = power_above(bins), rounded, split = UINT64_MAX, exact;
    if (direct) {
        add(codec, "symbol", n, base, bins);
        add_digit(codec, (uint64_t)1 << codec->bits);
    } else {
        rounded = kv_default_bytes(n, (unsigned)base);
        exact = kv_default_bytes(n, bins);
        if (low > 1 && high > 1) split = kv_default_bytes(n, low) + kv_default_bytes(n, high);
        codec->choice[2] = split < rounded && split <= exact;
        if (codec->choice[2]) {
            add(codec, "angle_low", n, low, low);
            add(codec, "angle_high", n, high, high);
        } else {
            add(codec, "angle", n, exact < rounded ? bins : base, bins);
        }
        if (kind) add(codec, "norm_codes", n, (uint64_t)1 << codec->bits, (uint64_t)1 << codec->bits);
    }
    codec->size = low;
    read_fields(c, codec, "angle-3");
}

static void read_group(kv_cursor *c, kv_codec *codec) {
    static const char *const axes[] = {"token", "channel", NULL};
    static const char *const scales[] = {"none", "fp16", "fp32", "fp16-per-head", "fp32-per-head", NULL};
    static const char *const u8[] = {"u8", NULL};
    set(&codec->bits, c, "bits", 1, 8);
    codec->choice[0] = kv_choice(c, "axis", axes);
    set(&codec->size, c, "size", 4, 128);
    if (codec->size & (codec->size - 1))
        kv_fail(c->reader, INVALID_HEADER, c->values, "size is %u", codec->size);
    read_rotation(c, codec);
    codec->choice[1] = kv_choice(c, "token_scale", scales);
    add(codec, "codes", codec->dim, 1u << codec->bits, 1u << codec->bits);
    read_fields(c, codec, "group-3");
    if (kv_key_is(c, "scale_dtype")) {
        c->values = "group-4";
        kv_choice(c, "scale_dtype", u8);
        codec->choice[2] = 1;
    }
    codec->group = codec->choice[0] ? 1 : codec->size;
}

static void read_klt(kv_cursor *c, kv_codec *codec) {
    static const char *const sides[] = {"k", "v", NULL}, *const rows[] = {"basis", "fp16", "fp32", NULL};
    static const char *const gains[] = {"none", "fp16", NULL};
    codec->basis = kv_binary(c, "basis", 32);
    set(&codec->layer, c, "layer", 0, 4095);
    codec->choice[0] = kv_choice(c, "side", sides);
    codec->choice[1] = kv_choice(c, "rows", rows);
    codec->widths = kv_next(c, "widths", V_BINARY)->bytes;
    codec->choice[2] = kv_choice(c, "gain", gains);
    unsigned counts[9] = {0}, dim = codec->dim, halves = (dim + 7) / 8;
    if (!kv_key_is(c, "fields") || c->map->items[2 * c->at + 1].type != V_MAP) kv_next(c, "fields", V_MAP);
    const kv_value *fields = &c->map->items[2 * c->at + 1];
    bool heads = fields->number == 1 && kv_is(fields->items[0].bytes, "codes");
    codec->choice[3] = heads;
    size_t size = codec->widths.size;
    if (heads ? !size || size % halves : size != (dim + 15) / 16)
        kv_fail(c->reader, INVALID_HEADER, "klt-2", "widths has %u bytes", (unsigned)size);
    for (size_t i = 0; i < size; i++) {
        uint8_t width = codec->widths.data[i];
        if (width > 8) kv_fail(c->reader, INVALID_HEADER, "klt-2", "a width is %u", width);
        unsigned left = dim - 16 * (unsigned)(heads ? 0 : i);
        counts[width] += left < 16 ? left : 16;
        codec->bits |= width;
    }
    if (!codec->bits) kv_fail(c->reader, INVALID_HEADER, "klt-2", "all widths are 0");
    if (heads) {
        kv_cursor map = {c->reader, kv_next(c, "fields", V_MAP), 0, "klt-3", "klt-2"};
        kv_integer(&map, "codes", 8, 8);
        codec->step = (unsigned)(size / halves); /* H */
        codec->bins = 0;                         /* the bytes of a row */
        for (size_t i = 0; i < size; i++) {
            unsigned left = dim - 8 * (unsigned)(i % halves);
            codec->bins += ((left < 8 ? left : 8) * codec->widths.data[i] + 7) / 8;
        }
        return;
    }
    for (unsigned width = 1; width <= 8; width++)
        if (counts[width]) {
            char name[20];
            snprintf(name, sizeof name, "codes_%u", width);
            add(codec, name, counts[width], 1u << width, 1u << width);
        }
    read_fields(c, codec, "klt-3");
}

static void read_chunk(kv_cursor *c, kv_codec *codec, const char *rule) {
    set(&codec->chunk, c, "chunk", 16, 256);
    if (codec->chunk & (codec->chunk - 1))
        kv_fail(c->reader, INVALID_HEADER, c->values, "chunk is %u", codec->chunk);
    if (codec->chunk * codec->dim > 65536)
        kv_fail(c->reader, INVALID_HEADER, rule, "chunk and dim have a product above 65536");
    codec->group = codec->chunk;
}

static void read_lossless(kv_cursor *c, kv_codec *codec) {
    static const char *const dtypes[] = {"bf16", "fp16", NULL};
    codec->choice[0] = kv_choice(c, "dtype", dtypes);
    read_chunk(c, codec, "lossless-4");
    unsigned alphabet = codec->choice[0] ? 2048 : 256;
    add(codec, "signed_fractions", codec->dim, alphabet, alphabet);
    read_fields(c, codec, "lossless-3");
}

static void read_minifloat(kv_cursor *c, kv_codec *codec) {
    static const char *const elements[] = {"e4m3", "e5m2", "e2m1", NULL};
    static const char *const sharing[] = {"tensor", "head", "token", "block", NULL};
    static const char *const blocks[] = {"e8m0", "e4m3", NULL};
    codec->choice[0] = kv_choice(c, "element", elements);
    codec->choice[1] = kv_choice(c, "granularity", sharing);
    bool block = codec->choice[1] == 3;
    codec->choice[2] = kv_choice(c, "scale_dtype", block ? blocks : halves_and_singles);
    codec->dtype = codec->choice[2] ? F32 : F16;
    unsigned alphabet = codec->choice[0] == 2 ? 16 : 256;
    add(codec, "codes", codec->dim, alphabet, alphabet);
    read_fields(c, codec, "minifloat-3");
    if (block && codec->choice[2] && codec->choice[0] != 2)
        kv_fail(c->reader, INVALID_HEADER, "minifloat-4", "scales of e4m3 are for elements of e2m1");
}

static void read_octahedral(kv_cursor *c, kv_codec *codec) {
    set(&codec->bits, c, "b_dir", 1, 8);
    set(&codec->bits_high, c, "b_norm", 0, 8);
    bool direct = kv_choice(c, "arrangement", arrangements);
    codec->choice[0] = direct;
    codec->norm = norm_dtypes[kv_choice(c, "norm", norms)];
    read_rotation(c, codec);
    codec->table = kv_binary(c, "direction_table", 4u << (codec->bits - 1));
    codec->high_table = kv_binary(c, "norm_table", 4u << codec->bits_high);
    check_table(c, codec->table, 1, "octahedral-4");
    check_table(c, codec->high_table, 1, "octahedral-4");
    unsigned m = 2 * (codec->bits - 1), n = (codec->dim + 2) / 3, padded = (n + 23) / 24 * 24;
    unsigned all = m + codec->bits_high;
    bool whole = all == 1 || all == 2 || all == 4 || all == 8 || all == 16;
    codec->choice[1] = whole;
    unsigned index = whole ? all : m, sign = whole ? 2 : 2 + codec->bits_high;
    codec->size = index;
    if (direct && index && index + sign > 8) {
        add(codec, "symbol", padded, 1u << index, 1u << index);
        add_digit(codec, 1u << sign);
    } else if (direct) {
        add(codec, "symbol", padded, 1u << (index + sign), 1u << (index + sign));
    } else {
        if (index) add(codec, "index", n, 1u << index, 1u << index);
        add(codec, "sign", n, 1u << sign, 1u << sign);
    }
    read_fields(c, codec, "octahedral-3");
}

static void read_polar(kv_cursor *c, kv_codec *codec) {
    kv_bytes text = kv_next(c, "bits", V_STRING)->bytes;
    unsigned levels = codec->levels = (unsigned)(text.size + 1) / 2, most = 0, dim = codec->dim;
    while (1u << most < dim) most++;
    bool right = text.size % 2 && levels <= most && dim % 2 == 0;
    for (size_t i = 0; right && i < text.size; i++)
        right = i % 2 ? text.data[i] == '.' : text.data[i] >= '1' && text.data[i] <= '8';
    if (!right) kv_fail(c->reader, INVALID_HEADER, "polar-2", "bits or dim has a value that does not exist");
    codec->dtype = kv_choice(c, "norm", halves_and_singles) ? F32 : F16;
    read_rotation(c, codec);
    codec->table = kv_next(c, "angle_table", V_BINARY)->bytes;
    size_t at = 0;
    unsigned radii = dim;
    for (unsigned l = 1; l <= levels; l++) {
        unsigned bits = codec->level_bits[l] = (uint8_t)(text.data[2 * l - 2] - '0'), pairs = radii / 2;
        bool unequal = (uint64_t)pairs << l > dim;
        unsigned tables = l == 1 ? 0 : (pairs > unequal) + unequal;
        for (unsigned i = 0; i < tables; i++, at += 4u << bits) {
            if (codec->table.size - at < 4u << bits)
                kv_fail(c->reader, INVALID_HEADER, "polar-4", "angle_table is cut short");
            check_table(c, (kv_bytes){codec->table.data + at, 4u << bits}, kv_float(0x3fc90fda), "polar-4");
        }
        if (l == 1 || bits != codec->level_bits[l - 1]) {
            char name[20];
            snprintf(name, sizeof name, "angles%u", l);
            add(codec, name, 0, 1u << bits, 1u << bits);
        }
        codec->packings[codec->packing_count - 1].symbols += pairs;
        radii = (radii + 1) / 2;
    }
    if (at != codec->table.size)
        kv_fail(c->reader, INVALID_HEADER, "polar-4", "angle_table has bytes left over");
    codec->size = radii; /* N_L */
    read_fields(c, codec, "polar-3");
}

static void read_quaternion(kv_cursor *c, kv_codec *codec) {
    set(&codec->secondary, c, "secondary", 1, 4096);
    set(&codec->bits, c, "radius_bits", 1, 8);
    bool direct = kv_choice(c, "arrangement", arrangements);
    codec->choice[0] = direct;
    codec->dtype = kv_choice(c, "norm", halves_and_singles) ? F32 : F16;
    codec->rotation = kv_choice(c, "rotation_kind", none_to_signed);
    codec->seed = kv_integer(c, "seed", 0, UINT64_MAX);
    codec->rotation_seed = kv_integer(c, "rotation_seed", 0, UINT64_MAX);
    if (direct && codec->secondary > 2730)
        kv_fail(c->reader, INVALID_HEADER, c->values, "secondary is %u", codec->secondary);
    unsigned n = (codec->dim + 3) / 4, words = 24 * codec->secondary, low = words & (0 - words),
             radii = 1u << codec->bits;
    if (direct) {
        add(codec, "symbol", n, power_above(words), words);
        add_digit(codec, radii);
    } else {
        bool split = words > 65536 ||
                     kv_default_bytes(n, low) + kv_default_bytes(n, words / low) < kv_default_bytes(n, words);
        codec->choice[1] = split;
        if (split) {
            add(codec, "codeword_low", n, low, low);
            add(codec, "codeword_high", n, words / low, words / low);
        } else {
            add(codec, "codeword", n, words, words);
        }
        add(codec, "radius", n, radii, radii);
    }
    codec->size = low;
    read_fields(c, codec, "quaternion-3");
}

static void read_scalar(kv_cursor *c, kv_codec *codec) {
    set(&codec->bits, c, "bits", 1, 8);
    set(&codec->bits_high, c, "bits_high", 0, 8);
    if (codec->bits_high && codec->bits_high <= codec->bits)
        kv_fail(c->reader, INVALID_HEADER, c->values, "bits_high is not above bits");
    unsigned high = 0, dim = codec->dim;
    codec->high_channels = kv_binary(c, "high_channels", codec->bits_high ? (dim + 7) / 8 : 0);
    for (size_t i = 0; i < 8 * codec->high_channels.size; i++)
        if (codec->high_channels.data[i / 8] >> i % 8 & 1) {
            if (i >= dim) kv_fail(c->reader, INVALID_HEADER, "scalar-6", "a channel from dim on is high");
            high++;
        }
    if (codec->bits_high && (!high || high == dim))
        kv_fail(c->reader, INVALID_HEADER, "scalar-5", "all channels have one width");
    codec->norm = norm_dtypes[kv_choice(c, "norm", norms)];
    read_rotation(c, codec);
    codec->table = kv_binary(c, "magnitude_table", 4u << (codec->bits - 1));
    codec->high_table =
        kv_binary(c, "high_magnitude_table", codec->bits_high ? 4u << (codec->bits_high - 1) : 0);
    check_table(c, codec->table, 1, "scalar-4");
    check_table(c, codec->high_table, 1, "scalar-4");
    add(codec, "codes", dim - high, 1u << codec->bits, 1u << codec->bits);
    if (high) add(codec, "codes_high", high, 1u << codec->bits_high, 1u << codec->bits_high);
    read_fields(c, codec, "scalar-3");
}

static void read_transform(kv_cursor *c, kv_codec *codec) {
    static const char *const sides[] = {"k", "v", NULL}, *const scopes[] = {"head", "layer", NULL};
    codec->basis = kv_binary(c, "basis", 32);
    set(&codec->layer, c, "layer", 0, 4095);
    codec->choice[0] = kv_choice(c, "side", sides);
    codec->choice[1] = kv_choice(c, "scope", scopes);
    set(&codec->step, c, "step", 0, 255);
    read_chunk(c, codec, "transform-3");
}

static void read_trellis(kv_cursor *c, kv_codec *codec) {
    set(&codec->bits, c, "bits", 1, 4);
    set(&codec->size, c, "state_bits", 8, 10);
    if (codec->size == 9) kv_fail(c->reader, INVALID_HEADER, c->values, "state_bits is 9");
    codec->norm = norm_dtypes[kv_choice(c, "norm", norms)];
    read_rotation(c, codec);
    codec->table = kv_next(c, "table", V_BINARY)->bytes;
    if (codec->table.size != 2u << codec->size)
        kv_fail(c->reader, INVALID_HEADER, "trellis-4", "table has %u bytes", (unsigned)codec->table.size);
    for (uint64_t i = 0; i < codec->table.size / 2; i++)
        if (!(fabsf(kv_number(F16, codec->table.data, i)) <= 1))
            kv_fail(c->reader, INVALID_HEADER, "trellis-4", "a value of table is beyond 1");
    if (codec->dim * codec->bits % 16)
        kv_fail(c->reader, INVALID_HEADER, "trellis-3", "a token does not have whole words");
    add(codec, "codes", codec->dim * codec->bits / 16, 65536, 65536);
    set_fields(c->reader, &codec->packings[0], 1);
}

static void read_raw(kv_cursor *c, kv_codec *codec) {
    codec->dtype = float_dtypes[kv_choice(c, "dtype", floats)];
}

static void read_opaque(kv_cursor *c, kv_codec *codec) {
    (void)c;
    codec->dtype = U8;
}

static void read_balanced(kv_cursor *c, kv_codec *codec) {
    static const char *const frames[] = {"balanced", "centered", NULL};
    kv_cursor map = {c->reader, kv_next(c, "balanced", V_MAP), 0, "side-cars-3", "side-cars-3"};
    codec->balanced_basis = kv_binary(&map, "basis", 32);
    set(&codec->balanced_layer, &map, "layer", 0, 4095);
    codec->balanced_frame = kv_choice(&map, "frame", frames);
    kv_end(&map);
}

static void read_mean(kv_cursor *c, kv_codec *codec) {
    kv_cursor map = {c->reader, kv_next(c, "key_mean", V_MAP), 0, "side-cars-3", "side-cars-3"};
    unsigned tokens, own = codec->group;
    set(&tokens, &map, "tokens", 8, 1024);
    set(&codec->mean_bits, &map, "bits", 4, 8);
    kv_end(&map);
    unsigned bits = codec->mean_bits;
    if (tokens & (tokens - 1) || (bits != 4 && bits != 8) || (bits == 4 && codec->dim % 2))
        kv_fail(c->reader, INVALID_HEADER, "side-cars-3",
                "tokens or bits of key_mean has a value that does not exist");
    if (own != 1)
        kv_fail(c->reader, INVALID_HEADER, "side-cars-15", "the codec has a token group of %u", own);
    codec->group = tokens;
}

static void read_outliers(kv_cursor *c, kv_codec *codec) {
    kv_cursor map = {c->reader, kv_next(c, "outliers", V_MAP), 0, "side-cars-3", "side-cars-3"};
    if (codec->dim % 4) kv_fail(c->reader, INVALID_HEADER, "side-cars-4", "dim is not a multiple of 4");
    codec->outlier_packing = codec->packing_count;
    add(codec, "outlier_flags", codec->dim / 4, 2, 2);
    set_fields(c->reader, &codec->packings[codec->outlier_packing],
               kv_next(&map, "fields", V_INTEGER)->number);
    kv_end(&map);
}

static void read_qjl(kv_cursor *c, kv_codec *codec) {
    kv_cursor map = {c->reader, kv_next(c, "qjl", V_MAP), 0, "side-cars-3", "side-cars-3"};
    codec->qjl_seed = kv_integer(&map, "seed", 0, UINT64_MAX);
    codec->qjl_dtype = kv_choice(&map, "norm", halves_and_singles) ? F32 : F16;
    codec->qjl_packing = codec->packing_count;
    add(codec, "qjl_signs", codec->dim, 2, 2);
    set_fields(c->reader, &codec->packings[codec->qjl_packing], kv_next(&map, "fields", V_INTEGER)->number);
    kv_end(&map);
    if (!kv_rotates(codec->dim))
        kv_fail(c->reader, INVALID_HEADER, "front-7", "there is no rotation of order %u", codec->dim);
}

static void read_cars(kv_cursor *c, kv_codec *codec) {
    static const char *const names[] = {"balanced",     "channel_scale", "channel_order", "block_rotation",
                                        "key_mean",     "outliers",      "qjl",           "raw_tokens",
                                        "raw_positions"};
    static const char *const orders[] = {"u8", "u16", NULL};
    c->values = "side-cars-3";
    for (unsigned car = 0; car <= S_POSITIONS; car++) {
        if (!kv_key_is(c, names[car])) continue;
        codec->cars |= 1u << car;
        if (car == S_BALANCED) read_balanced(c, codec);
        if (car == S_SCALE) codec->scale_dtype = kv_choice(c, names[car], halves_and_singles) ? F32 : F16;
        if (car == S_ORDER) codec->order_dtype = kv_choice(c, names[car], orders) ? U16 : U8;
        if (car == S_BLOCK) {
            set(&codec->block, c, names[car], 2, 1024);
            if (codec->dim % codec->block)
                kv_fail(c->reader, INVALID_HEADER, "side-cars-3", "the size of a block does not divide dim");
            if (!kv_rotates(codec->block))
                kv_fail(c->reader, INVALID_HEADER, "front-7", "there is no rotation of order %u",
                        codec->block);
        }
        if (car == S_MEAN) read_mean(c, codec);
        if (car == S_OUTLIERS) read_outliers(c, codec);
        if (car == S_QJL) read_qjl(c, codec);
        if (car == S_TOKENS) codec->tokens_dtype = float_dtypes[kv_choice(c, names[car], floats)];
        if (car == S_POSITIONS) codec->positions_dtype = float_dtypes[kv_choice(c, names[car], floats)];
    }
    if (codec->cars & 1u << S_ORDER && codec->order_dtype == U8 && codec->dim > 256)
        kv_fail(c->reader, INVALID_HEADER, "side-cars-3", "channel_order of u8 is for a dim of at most 256");
    for (unsigned car = 0; car <= S_POSITIONS; car++)
        if (kv_key_is(c, names[car]))
            kv_fail(c->reader, INVALID_HEADER, "side-cars-2", "%s is not in its place", names[car]);
}

void kv_read_codec(kv_reader *reader, const kv_value *map, kv_codec *codec) {
    static const struct {
        void (*read)(kv_cursor *, kv_codec *);
        unsigned least; /* of dim */
        const char *keys, *values, *cars;
    } codecs[] = {
        {read_angle, 2, "angle-1", "angle-2", NULL},
        {read_group, 1, "group-1", "group-2", NULL},
        {read_klt, 1, "klt-1", "klt-2", "klt-4"},
        {read_lossless, 1, "lossless-1", "lossless-2", "lossless-5"},
        {read_minifloat, 1, "minifloat-1", "minifloat-2", NULL},
        {read_octahedral, 4, "octahedral-1", "octahedral-2", NULL},
        {read_opaque, 1, "row-8", "row-8", "row-8"},
        {read_polar, 2, "polar-1", "polar-2", NULL},
        {read_quaternion, 1, "quaternion-1", "quaternion-2", NULL},
        {read_raw, 1, "raw-1", "raw-2", "side-cars-1"},
        {read_scalar, 2, "scalar-1", "scalar-2", NULL},
        {read_transform, 1, "transform-1", "transform-2", "transform-4"},
        {read_trellis, 1, "trellis-1", "trellis-2", NULL},
    };
    kv_cursor c = {reader, map, 0, "container-11", "container-11"};
    kv_bytes id = kv_next(&c, "id", V_STRING)->bytes;
    int at = 0;
    while (at < CODECS && (!kv_is(id, kv_codec_names[at]) || (at == C_OPAQUE && !reader->page))) at++;
    if (at == CODECS) kv_fail(reader, UNKNOWN_CODEC, "container-12", "the codec is not known");
    codec->id = (kv_codec_id)at;
    codec->group = 1;
    c.keys = codecs[at].keys;
    c.values = codecs[at].values;
    set(&codec->dim, &c, "dim", codecs[at].least, 1024);
    codecs[at].read(&c, codec);
    if (codec->rotation && !kv_rotates(codec->dim))
        kv_fail(reader, INVALID_HEADER, "front-7", "there is no rotation of order %u", codec->dim);
    if (codecs[at].cars) {
        c.keys = codecs[at].cars;
        c.values = "side-cars-3";
        if ((at == C_KLT || at == C_TRANSFORM) && kv_key_is(&c, "raw_positions")) read_cars(&c, codec);
    } else {
        read_cars(&c, codec);
    }
    kv_end(&c);
}
