/* Side-cars, the rotation back, and the values of a side (side-cars.md). */
#include "kvpack.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool has(const kv_side *side, kv_car car) { return side->codec->cars >> car & 1; }

static void check_orders(kv_file *file, const kv_side *side) {
    const kv_tensor *orders = kv_stream(side, "channel_order");
    unsigned dim = side->codec->dim;
    for (uint64_t row = 0; row < orders->count / dim; row++) {
        uint8_t seen[1024] = {0};
        for (unsigned i = 0; i < dim; i++) {
            float channel = kv_number(orders->dtype, orders->data, row * dim + i);
            if (channel >= (float)dim || seen[(unsigned)channel]++)
                kv_fail(file->reader, INVALID_PAYLOAD, "side-cars-8", "a row of channel_order is no order");
        }
    }
}

/* Count the flags before those of every token, sequence and head, which is the order of items. */
static void check_outliers(kv_file *file, kv_side *side) {
    uint32_t flags[256];
    uint64_t count = 0, heads = side->batch * side->heads;
    unsigned quadruples = side->codec->dim / 4;
    side->outliers = kv_take(file->reader, kv_times(heads, side->packed), sizeof *side->outliers);
    kv_place at = {0};
    for (at.token = 0; at.token < side->packed; at.token++)
        for (at.sequence = 0; at.sequence < side->batch; at.sequence++)
            for (at.head = 0; at.head < side->heads; at.head++) {
                kv_digits(file, side, &at, side->codec->outlier_packing, flags);
                side->outliers[kv_at(side, &at, side->packed, at.token)] = count;
                for (unsigned i = 0; i < quadruples; i++) count += flags[i];
            }
    if (count != kv_stream(side, "outliers")->shape[2])
        kv_fail(file->reader, INVALID_PAYLOAD, "side-cars-5", "%llu flags of outliers are 1",
                (unsigned long long)count);
}

static void check_raw_tokens(kv_file *file, const kv_side *side) {
    const kv_tensor *flags = kv_stream(side, "raw_token_flags");
    uint64_t count = 0;
    for (uint64_t i = 0; i < flags->count; i++) {
        if (flags->data[i] > 1)
            kv_fail(file->reader, INVALID_PAYLOAD, "side-cars-7", "a flag of raw tokens is %u",
                    flags->data[i]);
        count += flags->data[i];
    }
    if (count != kv_stream(side, "raw_tokens")->shape[2])
        kv_fail(file->reader, INVALID_PAYLOAD, "side-cars-5", "%llu flags of raw tokens are 1",
                (unsigned long long)count);
}

static void check_positions(kv_file *file, const kv_side *side) {
    kv_reader *r = file->reader;
    const kv_tensor *positions = kv_stream(side, "raw_positions"), *values = kv_stream(side, "raw_values");
    uint64_t count = positions->shape[2], last = 0, last_sequence = 0;
    uint64_t bytes = side->heads * side->codec->dim * (uint64_t)kv_dtype_bytes[values->dtype];
    bool unused = false;
    if (count != values->shape[2])
        kv_fail(r, INVALID_PAYLOAD, "side-cars-12",
                "positions and raw values have different numbers of items");
    for (uint64_t i = 0; i < count; i++) {
        uint64_t token = kv_little(positions->data + 8 * i, 6),
                 sequence = kv_little(positions->data + 8 * i + 6, 2);
        bool right = true;
        if (token || sequence) {
            right = token && token <= side->packed && sequence < side->batch && !unused;
            right = right && (token > last || (token == last && sequence > last_sequence));
        } else {
            unused = true;
            for (uint64_t k = 0; right && k < bytes; k++) right = !values->data[i * bytes + k];
        }
        if (!right)
            kv_fail(r, INVALID_PAYLOAD, "side-cars-13", "position %llu has another form",
                    (unsigned long long)i);
        last = token;
        last_sequence = sequence;
    }
}

void kv_check_cars(kv_file *file, kv_side *side) {
    if (has(side, S_SCALE)) {
        const kv_tensor *scales = kv_stream(side, "channel_scale");
        for (uint64_t i = 0; i < scales->count; i++)
            if (!(kv_number(scales->dtype, scales->data, i) > 0))
                kv_fail(file->reader, INVALID_PAYLOAD, "side-cars-6", "a channel scale is not above 0");
    }
    if (has(side, S_ORDER)) check_orders(file, side);
    if (has(side, S_OUTLIERS)) check_outliers(file, side);
    if (has(side, S_TOKENS)) check_raw_tokens(file, side);
    if (has(side, S_POSITIONS)) check_positions(file, side);
}

static void add_mean(const kv_side *side, const kv_place *at, float *u) {
    const kv_codec *codec = side->codec;
    const kv_tensor *means = kv_stream(side, "key_mean"), *scales = kv_stream(side, "key_mean_scale");
    unsigned dim = codec->dim, bytes = dim * codec->mean_bits / 8;
    uint64_t row = kv_at(side, at, side->groups, at->group);
    float scale = kv_number(F16, scales->data, row);
    for (unsigned c = 0; c < dim; c++) {
        int q = means->data[row * bytes + c % bytes];
        if (codec->mean_bits == 4) q = c < bytes ? q & 15 : q >> 4;
        u[c] += (float)(q - (1 << (codec->mean_bits - 1))) * scale;
    }
}

static void put_outliers(kv_file *file, const kv_side *side, const kv_place *at, float *u) {
    uint32_t flags[256];
    const kv_tensor *items = kv_stream(side, "outliers");
    uint64_t item = side->outliers[kv_at(side, at, side->packed, at->token)];
    kv_digits(file, side, at, side->codec->outlier_packing, flags);
    for (unsigned i = 0; i < side->codec->dim / 4; i++)
        if (flags[i]) {
            for (unsigned k = 0; k < 4; k++) u[4 * i + k] = kv_number(F16, items->data, 4 * item + k);
            item++;
        }
}

static void rotate(float *u, unsigned dim, const int8_t *signs) {
    double from[1024] = {0}, to[1024];
    for (unsigned j = 0; j < dim; j++) from[j] = u[j];
    kv_rotate_back(from, to, dim, signs);
    for (unsigned j = 0; j < dim; j++) u[j] = (float)to[j];
}

static void add_qjl(kv_file *file, const kv_side *side, const kv_place *at, float *u) {
    const kv_codec *codec = side->codec;
    uint32_t digits[1024];
    double z[1024], x[1024];
    kv_digits(file, side, at, codec->qjl_packing, digits);
    for (unsigned j = 0; j < codec->dim; j++) z[j] = digits[j] ? -1 : 1;
    kv_rotate_back(z, x, codec->dim, codec->qjl_signs);
    double factor = kv_per_token(side, at, "qjl_norm") * sqrt(3.14159265358979323846 / (2.0 * codec->dim));
    for (unsigned j = 0; j < codec->dim; j++) u[j] = (float)(u[j] + factor * x[j]);
}

static void reorder(const kv_side *side, const kv_place *at, float *u) {
    float x[1024];
    unsigned dim = side->codec->dim;
    const kv_tensor *orders = kv_stream(side, "channel_order");
    memcpy(x, u, dim * sizeof *u);
    for (unsigned i = 0; i < dim; i++) {
        uint64_t index = kv_at(side, at, side->run_count, at->run) * dim + i;
        u[(unsigned)kv_number(orders->dtype, orders->data, index)] = x[i];
    }
}

/* The balanced matrices of a side (rules side-cars-16 to side-cars-18). */
static const kv_tensor *find_balanced(kv_file *file, const kv_side *side) {
    kv_reader *r = file->reader;
    const kv_codec *codec = side->codec;
    kv_file *basis = kv_basis(file, codec->balanced_basis, "side-cars-16");
    const char *name = codec->balanced_frame ? "k.centered" : "k.balanced";
    const kv_tensor *found = kv_basis_state(basis, codec->balanced_layer, name);
    if (!found) kv_fail(r, INVALID_HEADER, "side-cars-17", "the basis has no state %s of the layer", name);
    if (found->shape[1] != side->heads || found->shape[2] != codec->dim)
        kv_fail(r, INVALID_HEADER, "side-cars-18", "the balanced matrices are of other heads");
    return found;
}

static void balance(const kv_tensor *matrix, const kv_place *at, unsigned dim, float *u) {
    double x[1024] = {0};
    for (unsigned j = 0; j < dim; j++)
        for (unsigned c = 0; c < dim; c++)
            x[c] += (double)u[j] * kv_number(matrix->dtype, matrix->data, (at->head * dim + j) * dim + c);
    for (unsigned c = 0; c < dim; c++) u[c] = (float)x[c];
}

static void decode_cars(kv_file *file, kv_side *side, const kv_place *at, const kv_tensor *matrix, float *u) {
    const kv_codec *codec = side->codec;
    unsigned dim = codec->dim;
    if (has(side, S_OUTLIERS)) put_outliers(file, side, at, u);
    if (has(side, S_MEAN)) add_mean(side, at, u);
    if (has(side, S_QJL)) add_qjl(file, side, at, u);
    if (codec->rotation) rotate(u, dim, codec->signs);
    for (unsigned i = 0; has(side, S_BLOCK) && i < dim; i += codec->block) rotate(u + i, codec->block, NULL);
    if (has(side, S_ORDER)) reorder(side, at, u);
    if (has(side, S_SCALE)) {
        const kv_tensor *scales = kv_stream(side, "channel_scale");
        for (unsigned j = 0; j < dim; j++)
            u[j] *=
                kv_number(scales->dtype, scales->data, kv_at(side, at, side->run_count, at->run) * dim + j);
    }
    if (matrix) balance(matrix, at, dim, u);
}

/* Put the values of an item into all heads of a token. */
static void put_item(const kv_side *side, const kv_tensor *items, uint64_t item, uint64_t sequence,
                     uint64_t token, float *values) {
    unsigned dim = side->codec->dim;
    for (uint64_t h = 0; h < side->heads; h++) {
        float *to = values + ((sequence * side->heads + h) * (side->packed + side->tail) + token) * dim;
        for (unsigned j = 0; j < dim; j++)
            to[j] = kv_number(items->dtype, items->data, (item * side->heads + h) * dim + j);
    }
}

static void put_raw(const kv_side *side, float *values) {
    if (has(side, S_TOKENS)) {
        const kv_tensor *flags = kv_stream(side, "raw_token_flags"), *items = kv_stream(side, "raw_tokens");
        uint64_t item = 0;
        for (uint64_t t = 0; t < side->packed; t++)
            for (uint64_t s = 0; s < side->batch; s++)
                if (flags->data[s * side->packed + t]) put_item(side, items, item++, s, t, values);
    }
    if (has(side, S_POSITIONS)) {
        const kv_tensor *positions = kv_stream(side, "raw_positions"), *items = kv_stream(side, "raw_values");
        for (uint64_t i = 0; i < positions->shape[2]; i++) {
            uint64_t token = kv_little(positions->data + 8 * i, 6);
            if (token) put_item(side, items, i, kv_little(positions->data + 8 * i + 6, 2), token - 1, values);
        }
    }
}

uint64_t kv_value_count(const kv_side *side) {
    return kv_times(kv_times(side->batch * side->heads, side->packed + side->tail), side->codec->dim);
}

/* Decode a side whose file kv_check has found right: [batch, kv_head, token, channel], tails included. */
void kv_decode(kv_file *file, kv_side *side, float *values) {
    const kv_codec *codec = side->codec;
    unsigned dim = codec->dim;
    const kv_tensor *tail = side->tail ? kv_stream(side, "tail") : NULL, *matrix = NULL;
    if (has(side, S_BALANCED)) matrix = find_balanced(file, side);
    if (codec->id == C_TRANSFORM) kv_basis(file, codec->basis, "transform-5");
    if (codec->id == C_KLT && !codec->choice[1]) kv_basis(file, codec->basis, "klt-5");
    kv_block *mark = file->reader->blocks; /* bases stay, and what is taken for this side goes */
    if (codec->id == C_KLT) kv_decode_klt(file, side);
    if (codec->id == C_TRANSFORM) kv_decode_transform(file, side);
    kv_prepare_codec(file->reader, side->codec);
    float *to = values;
    kv_place at = {0};
    for (at.sequence = 0; kv_value_count(side) && at.sequence < side->batch; at.sequence++)
        for (at.head = 0; at.head < side->heads; at.head++) {
            uint64_t first = 0;
            at.token = 0;
            for (at.run = 0; at.run < side->run_count; at.run++) {
                uint64_t run = side->runs[at.run];
                for (at.in_run = 0; at.in_run < run; at.in_run++, at.token++, to += dim) {
                    at.group = first + at.in_run / codec->group;
                    kv_decode_token(file, side, &at, to);
                    decode_cars(file, side, &at, matrix, to);
                }
                first += (run + codec->group - 1) / codec->group;
            }
            for (uint64_t i = 0; i < side->tail * dim; i++)
                *to++ = kv_number(tail->dtype, tail->data, kv_at(side, &at, side->tail, 0) * dim + i);
        }
    put_raw(side, values);
    kv_release(file->reader, mark);
}
