/* What the codecs decode to in coded coordinates, before side-cars and the rotation back (codecs/). */
#include "kvpack.h"

#include <float.h>
#include <math.h>
#include <string.h>

_Static_assert(FLT_EVAL_METHOD == 0, "an operation in binary32 is rounded once");

/* Where the row of a stream with `rows` rows for every head begins, counted in rows. */
uint64_t kv_at(const kv_side *side, const kv_place *at, uint64_t rows, uint64_t row) {
    return (at->sequence * side->heads + at->head) * rows + row;
}

/* The number of a stream of one number per token and head. */
float kv_per_token(const kv_side *side, const kv_place *at, const char *name) {
    const kv_tensor *stream = kv_stream(side, name);
    return kv_number(stream->dtype, stream->data, kv_at(side, at, side->packed, at->token));
}

static float norm_of(const kv_side *side, const kv_place *at) {
    const kv_tensor *stream = kv_stream(side, "norm");
    uint64_t index = kv_at(side, at, side->packed, at->token);
    return stream->dtype == U8 ? kv_norm8(stream->data[index])
                               : kv_number(stream->dtype, stream->data, index);
}

void kv_digits(kv_file *file, const kv_side *side, const kv_place *at, unsigned packing, uint32_t *digits) {
    const uint8_t *planes[8] = {NULL};
    for (unsigned i = 0; i < side->codec->packings[packing].planes; i++)
        planes[i] = side->tensors[side->planes[packing] + i].data;
    kv_unpack(file->reader, &side->codec->packings[packing], planes, kv_at(side, at, side->packed, at->token),
              digits);
}

/* Direction p of `bins` angles around the circle; one on an axis is exact. */
static void put_bin(float to[2], unsigned p, unsigned bins) {
    double angle = 3.14159265358979323846 * (2.0 * p + 1) / bins;
    to[0] = 4 * p + 2 == bins || 4 * p + 2 == 3 * bins ? 0 : (float)cos(angle);
    to[1] = 2 * p + 1 == bins ? 0 : (float)sin(angle);
}

static void prepare_quaternion(kv_reader *r, kv_codec *codec) {
    uint64_t state = codec->seed;
    codec->directions = kv_take(r, 4 * 24 * (uint64_t)codec->secondary, sizeof(float));
    for (unsigned s = 0; s < codec->secondary; s++) {
        double q[4];
        kv_quaternion(&state, q);
        double w = (float)q[0], x = (float)q[1], y = (float)q[2], z = (float)q[3];
        for (unsigned p = 0; p < 24; p++) {
            double u[4] = {0, 0, 0, 0};
            if (p < 8) u[p / 2] = p % 2 ? -1 : 1;
            for (int i = 0; p >= 8 && i < 4; i++) u[i] = (p - 8) >> i & 1 ? -0.5 : 0.5;
            float *to = codec->directions + 4 * (24 * s + p);
            to[0] = (float)(u[0] * w - u[1] * x - u[2] * y - u[3] * z);
            to[1] = (float)(u[0] * x + u[1] * w + u[2] * z - u[3] * y);
            to[2] = (float)(u[0] * y - u[1] * z + u[2] * w + u[3] * x);
            to[3] = (float)(u[0] * z + u[1] * y - u[2] * x + u[3] * w);
        }
    }
}

static void prepare_polar(kv_reader *r, kv_codec *codec) {
    unsigned first = 1u << codec->level_bits[1];
    uint64_t count = codec->table.size / 4;
    codec->directions = kv_take(r, 2 * (first + count), sizeof(float));
    for (unsigned p = 0; p < first; p++) put_bin(codec->directions + 2 * p, p, first);
    for (unsigned i = 0; i < count; i++) {
        double angle = kv_number(F32, codec->table.data, i);
        codec->directions[2 * (first + i)] = (float)cos(angle);
        codec->directions[2 * (first + i) + 1] = (float)sin(angle);
    }
}

/* Compute what all tokens of a codec share, until it is released. */
void kv_prepare_codec(kv_reader *r, kv_codec *codec) {
    if (codec->rotation == 2) {
        codec->signs = kv_take(r, codec->dim, 1);
        kv_signs(codec->rotation_seed, codec->dim, codec->signs);
    }
    if (codec->cars & 1u << S_QJL) {
        codec->qjl_signs = kv_take(r, codec->dim, 1);
        kv_signs(codec->qjl_seed, codec->dim, codec->qjl_signs);
    }
    if (codec->id == C_QUATERNION) prepare_quaternion(r, codec);
    if (codec->id == C_POLAR) prepare_polar(r, codec);
}

/* A scale (0) or center (1) of 8 bits by the row of its run. */
static uint16_t ranged(const kv_tensor *ranges, uint64_t row, int kind, unsigned k) {
    float step = kv_number(F16, ranges->data, 4 * row + 2 * (unsigned)kind);
    float minimum = kv_number(F16, ranges->data, 4 * row + 2 * (unsigned)kind + 1);
    float r = minimum + step * (float)k;
    return kv_to_half(r * fabsf(r));
}

static void decode_group(kv_file *file, kv_side *side, const kv_place *at, float *u) {
    const kv_codec *codec = side->codec;
    const kv_tensor *scales = kv_stream(side, "scales"),
                    *ranges = codec->choice[2] ? kv_stream(side, "scale_range") : NULL;
    uint32_t digits[1024];
    kv_digits(file, side, at, 0, digits);
    float half = (float)((1u << codec->bits) - 1) / 2, scale = 1;
    unsigned count = codec->choice[0] ? (codec->dim + codec->size - 1) / codec->size : codec->dim;
    uint64_t rows = codec->choice[0] ? side->packed : side->groups;
    uint64_t row = kv_at(side, at, rows, codec->choice[0] ? at->token : at->group);
    if (codec->choice[1]) {
        const kv_tensor *stream = kv_stream(side, "token_scale");
        bool per_head = codec->choice[1] > 2;
        uint64_t index =
            per_head ? kv_at(side, at, side->packed, at->token) : at->sequence * side->packed + at->token;
        scale = kv_number(stream->dtype, stream->data, index);
    }
    for (unsigned j = 0; j < codec->dim; j++) {
        uint64_t pair = 2 * (row * count + (codec->choice[0] ? j / codec->size : j));
        float parts[2];
        for (int kind = 0; kind < 2; kind++) {
            uint64_t run = ranges ? kv_at(side, at, side->run_count, at->run) : 0;
            parts[kind] = ranges ? kv_half(ranged(ranges, run, kind, scales->data[pair + (unsigned)kind]))
                                 : kv_number(F16, scales->data, pair + (unsigned)kind);
        }
        u[j] = ((float)digits[j] - half) * parts[0] + parts[1];
        if (codec->choice[1]) u[j] *= scale;
    }
}

static float element_value(unsigned code, unsigned exponents, unsigned fractions, int bias) {
    unsigned e = code >> fractions & ((1u << exponents) - 1), f = code & ((1u << fractions) - 1);
    float size = e ? ldexpf((float)(f | 1u << fractions), (int)e - bias - (int)fractions)
                   : ldexpf((float)f, 1 - bias - (int)fractions);
    return code >> (exponents + fractions) & 1 ? -size : size;
}

static void decode_minifloat(kv_file *file, kv_side *side, const kv_place *at, float *u) {
    static const unsigned exponents[] = {4, 5, 2}, fractions[] = {3, 2, 1};
    static const int biases[] = {7, 15, 1};
    const kv_codec *codec = side->codec;
    const unsigned *choice = codec->choice;
    uint32_t digits[1024];
    float scale = 1;
    const kv_tensor *blocks = choice[1] == 3 ? kv_stream(side, "block_scales") : NULL;
    if (!blocks || choice[2]) {
        const kv_tensor *stream = kv_stream(side, blocks ? "global_scale" : "scale");
        bool heads = !blocks && choice[1];
        uint64_t rows = !blocks && choice[1] == 2 ? side->packed : side->run_count;
        uint64_t row = !blocks && choice[1] == 2 ? at->token : at->run;
        scale = kv_number(stream->dtype, stream->data,
                          heads ? kv_at(side, at, rows, row) : at->sequence * rows + row);
    }
    kv_digits(file, side, at, 0, digits);
    unsigned width = choice[2] ? 16 : 32, count = (codec->dim + width - 1) / width;
    for (unsigned j = 0; j < codec->dim; j++) {
        float v = element_value(digits[j], exponents[choice[0]], fractions[choice[0]], biases[choice[0]]);
        uint8_t k = blocks ? blocks->data[kv_at(side, at, side->packed, at->token) * count + j / width] : 0;
        if (blocks && choice[2]) v *= element_value(k, 4, 3, 7);
        u[j] = blocks && !choice[2] ? (float)ldexp(v, k - 127) : v * scale;
    }
}

static void decode_scalar(kv_file *file, kv_side *side, const kv_place *at, float *u) {
    const kv_codec *codec = side->codec;
    uint32_t low[1024], high[1024];
    unsigned l = 0, h = 0;
    float norm = norm_of(side, at);
    kv_digits(file, side, at, 0, low);
    if (codec->bits_high) kv_digits(file, side, at, 1, high);
    for (unsigned c = 0; c < codec->dim; c++) {
        bool is_high = codec->bits_high && codec->high_channels.data[c / 8] >> c % 8 & 1;
        uint32_t s = is_high ? high[h++] : low[l++],
                 half = 1u << ((is_high ? codec->bits_high : codec->bits) - 1);
        float a = kv_number(F32, is_high ? codec->high_table.data : codec->table.data, s % half);
        u[c] = (s >= half ? -a : a) * norm;
    }
}

static void decode_trellis(kv_file *file, kv_side *side, const kv_place *at, float *u) {
    const kv_codec *codec = side->codec;
    uint32_t words[256];
    unsigned n = codec->dim * codec->bits;
    float norm = norm_of(side, at);
    kv_digits(file, side, at, 0, words);
    for (unsigned c = 0; c < codec->dim; c++) {
        unsigned first = (codec->bits * (c + 1) + n - codec->size) % n, state = 0;
        for (unsigned i = 0; i < codec->size; i++) {
            unsigned bit = (first + i) % n;
            state |= (words[bit / 16] >> bit % 16 & 1) << i;
        }
        u[c] = kv_number(F16, codec->table.data, state) * norm;
    }
}

static void decode_octahedral(kv_file *file, kv_side *side, const kv_place *at, float *u) {
    const kv_codec *codec = side->codec;
    uint32_t first[2 * 360] = {0}, second[2 * 360] = {0};
    unsigned n = (codec->dim + 2) / 3, index_bits = codec->size, axis = codec->bits - 1, levels = 1u << axis;
    float norm = norm_of(side, at);
    const kv_packing *p = &codec->packings[0];
    if (codec->choice[0]) { /* direct */
        kv_digits(file, side, at, 0, first);
        for (unsigned r = 0; r < p->symbols; r++) {
            if (p->digits == 2) second[r] = first[p->symbols + r];
            else second[r] = first[r] >> index_bits;
            first[r] &= (1u << index_bits) - 1;
            if (r >= n && (first[r] || second[r]))
                kv_fail(file->reader, INVALID_PAYLOAD, "octahedral-5",
                        "a triplet beyond the last is not zero");
        }
    } else {
        if (index_bits) kv_digits(file, side, at, 0, first);
        kv_digits(file, side, at, index_bits > 0, second);
    }
    for (unsigned r = 0; r < n; r++) {
        unsigned i = first[r] & (levels - 1), j = first[r] >> axis & (levels - 1);
        unsigned level = codec->choice[1] ? first[r] >> 2 * axis : second[r] >> 2;
        double xi = kv_number(F32, codec->table.data, i), eta = kv_number(F32, codec->table.data, j);
        double z = (1 - xi) - eta, x = z >= 0 ? xi : 1 - eta, y = z >= 0 ? eta : 1 - xi;
        double length = sqrt(x * x + y * y + z * z);
        float d[3] = {(float)(x / length), (float)(y / length), (float)(z / length)};
        d[0] = second[r] & 1 ? -d[0] : d[0];
        d[1] = second[r] & 2 ? -d[1] : d[1];
        for (unsigned k = 0; k < 3 && 3 * r + k < codec->dim; k++)
            u[3 * r + k] = d[k] * kv_number(F32, codec->high_table.data, level) * norm;
    }
}

static void decode_quaternion(kv_file *file, kv_side *side, const kv_place *at, float *u) {
    const kv_codec *codec = side->codec;
    uint32_t words[512], high[256], radii[256];
    unsigned n = (codec->dim + 3) / 4;
    float scale = kv_per_token(side, at, "scale") / (float)((1u << codec->bits) - 1);
    kv_digits(file, side, at, 0, words);
    if (codec->choice[0]) {
        memcpy(radii, words + n, n * sizeof *words);
    } else {
        kv_digits(file, side, at, codec->choice[1] ? 2 : 1, radii);
        if (codec->choice[1]) kv_digits(file, side, at, 1, high);
    }
    for (unsigned i = 0; i < n; i++) {
        uint32_t word = codec->choice[1] ? high[i] * codec->size + words[i] : words[i];
        float r = (float)radii[i] * scale;
        for (unsigned k = 0; k < 4 && 4 * i + k < codec->dim; k++)
            u[4 * i + k] = r * codec->directions[4 * word + k];
    }
}

static void decode_angle(kv_file *file, kv_side *side, const kv_place *at, float *u) {
    const kv_codec *codec = side->codec;
    uint32_t bins[1024], high[512], norms[512] = {0};
    unsigned n = codec->dim / 2, split = codec->choice[2], kind = codec->choice[0];
    kv_digits(file, side, at, 0, bins);
    if (codec->choice[1]) memcpy(norms, bins + n, n * sizeof *bins);
    else if (kind) kv_digits(file, side, at, 1 + split, norms);
    if (split) kv_digits(file, side, at, 1, high);
    const kv_tensor *stream = kv_stream(side, kind ? "range" : "norm");
    uint64_t row = kv_at(side, at, side->packed, at->token);
    for (unsigned i = 0; i < n; i++) {
        uint32_t p = split ? high[i] * codec->size + bins[i] : bins[i];
        float r;
        if (kind) {
            float step = kv_number(stream->dtype, stream->data, 2 * row);
            float minimum = kv_number(stream->dtype, stream->data, 2 * row + 1);
            r = minimum + step * (float)norms[i];
            if (kind == 2) r = (float)exp2(r);
        } else {
            r = kv_number(F32, stream->data, row * n + i);
        }
        float direction[2];
        put_bin(direction, p, codec->bins);
        u[2 * i] = r * direction[0];
        u[2 * i + 1] = r * direction[1];
    }
}

static void decode_polar(kv_file *file, kv_side *side, const kv_place *at, float *u) {
    const kv_codec *codec = side->codec;
    uint32_t codes[1024];
    unsigned counts[12], starts[12], tables[12], done = 0, table = 1u << codec->level_bits[1];
    for (unsigned i = 0; i < codec->packing_count && done < codec->dim - codec->size; i++) {
        kv_digits(file, side, at, i, codes + done);
        done += codec->packings[i].symbols;
    }
    counts[0] = codec->dim;
    starts[1] = tables[1] = 0;
    for (unsigned l = 1; l <= codec->levels; l++) {
        unsigned pairs = counts[l - 1] / 2;
        bool unequal = (uint64_t)pairs << l > codec->dim;
        counts[l] = (counts[l - 1] + 1) / 2;
        starts[l + 1] = starts[l] + pairs;
        if (l > 1) {
            tables[l] = table;
            table += ((pairs > unequal) + (unsigned)unequal) << codec->level_bits[l];
        }
    }
    const kv_tensor *stream = kv_stream(side, "radius");
    uint64_t row = kv_at(side, at, side->packed, at->token) * codec->size;
    for (unsigned i = 0; i < codec->size; i++) u[i] = kv_number(stream->dtype, stream->data, row + i);
    for (unsigned l = codec->levels; l; l--) {
        float below[1024];
        unsigned pairs = counts[l - 1] / 2;
        if (counts[l - 1] % 2) below[counts[l - 1] - 1] = u[counts[l] - 1];
        for (unsigned i = 0; i < pairs; i++) {
            bool unequal = l > 1 && i == pairs - 1 && (uint64_t)pairs << l > codec->dim;
            unsigned first = tables[l] + (unequal && pairs > 1 ? 1u << codec->level_bits[l] : 0);
            const float *direction = codec->directions + 2 * (first + codes[starts[l] + i]);
            below[2 * i] = u[i] * direction[0];
            below[2 * i + 1] = u[i] * direction[1];
        }
        memcpy(u, below, counts[l - 1] * sizeof *u);
    }
}

static void decode_stored(kv_side *side, const kv_place *at, const char *name, float *u) {
    const kv_tensor *stream = kv_stream(side, name);
    for (unsigned j = 0; j < side->codec->dim; j++)
        u[j] = kv_number(stream->dtype, stream->data,
                         kv_at(side, at, side->packed, at->token) * side->codec->dim + j);
}

static void decode_lossless(kv_file *file, kv_side *side, const kv_place *at, float *u) {
    const kv_codec *codec = side->codec;
    uint32_t digits[1024];
    unsigned fraction = codec->choice[0] ? 10 : 7;
    const uint8_t *exponents = side->symbols + kv_at(side, at, side->packed, at->token) * codec->dim;
    kv_digits(file, side, at, 0, digits);
    for (unsigned j = 0; j < codec->dim; j++) {
        uint32_t sign = digits[j] >> fraction, rest = digits[j] & ((1u << fraction) - 1);
        uint32_t bits = sign << 15 | (uint32_t)exponents[j] << fraction | rest;
        u[j] = codec->choice[0] ? kv_half((uint16_t)bits) : kv_float(bits << 16);
    }
}

void kv_decode_token(kv_file *file, kv_side *side, const kv_place *at, float *u) {
    static void (*const decoders[CODECS])(kv_file *, kv_side *, const kv_place *, float *) = {
        [C_ANGLE] = decode_angle,           [C_GROUP] = decode_group,
        [C_LOSSLESS] = decode_lossless,     [C_MINIFLOAT] = decode_minifloat,
        [C_OCTAHEDRAL] = decode_octahedral, [C_POLAR] = decode_polar,
        [C_QUATERNION] = decode_quaternion, [C_SCALAR] = decode_scalar,
        [C_TRELLIS] = decode_trellis};
    unsigned dim = side->codec->dim;
    if (side->codec->id == C_KLT || side->codec->id == C_TRANSFORM)
        memcpy(u, side->early + kv_at(side, at, side->packed, at->token) * dim, dim * sizeof *u);
    else if (side->codec->id == C_RAW || side->codec->id == C_OPAQUE)
        decode_stored(side, at, side->codec->id == C_RAW ? "values" : "bytes", u);
    else decoders[side->codec->id](file, side, at, u);
}

static void check_minifloat(kv_file *file, kv_side *side) {
    kv_reader *r = file->reader;
    const unsigned *choice = side->codec->choice;
    if (choice[1] == 3) {
        const kv_tensor *scales = kv_stream(side, "block_scales");
        for (uint64_t i = 0; i < scales->count; i++)
            if (choice[2] ? scales->data[i] > 0x7e : scales->data[i] == 0xff)
                kv_fail(r, INVALID_PAYLOAD, choice[2] ? "minifloat-8" : "minifloat-7",
                        "a scale of a block is %u", scales->data[i]);
    }
}

static void check_elements(kv_file *file, const kv_side *side, const uint32_t *digits) {
    for (unsigned j = 0; j < side->codec->dim; j++)
        if (side->codec->choice[0] == 0 ? (digits[j] & 0x7f) == 0x7f
                                        : side->codec->choice[0] == 1 && (digits[j] & 0x7f) >= 0x7c)
            kv_fail(file->reader, INVALID_PAYLOAD, "minifloat-6", "an element is not finite");
}

static void check_group(kv_file *file, kv_side *side) {
    if (!side->codec->choice[2]) return;
    const kv_tensor *ranges = kv_stream(side, "scale_range");
    for (uint64_t row = 0; row < ranges->count / 4; row++)
        for (int kind = 0; kind < 2; kind++)
            for (unsigned k = 0; k < 256; k += 255)
                if ((ranged(ranges, row, kind, k) & 0x7c00) == 0x7c00)
                    kv_fail(file->reader, INVALID_PAYLOAD, "group-7",
                            "scale_range gives a number that is not finite");
}

/* Check what a codec says of its streams, and every digit. */
void kv_check_codec(kv_file *file, kv_side *side) {
    const kv_codec *codec = side->codec;
    if (!side->packed && codec->id != C_LOSSLESS && codec->id != C_TRANSFORM) return;
    if (codec->id == C_LOSSLESS || codec->id == C_TRANSFORM) kv_check_segments(file, side);
    if (codec->id == C_MINIFLOAT) check_minifloat(file, side);
    if (codec->id == C_GROUP) check_group(file, side);
    if (codec->id == C_KLT) kv_check_klt(file, side);
    uint32_t digits[2048];
    float u[1024];
    kv_place at = {0};
    for (at.sequence = 0; at.sequence < side->batch; at.sequence++)
        for (at.head = 0; at.head < side->heads; at.head++)
            for (at.token = 0; at.token < side->packed && codec->packing_count; at.token++) {
                for (unsigned i = 0; i < codec->packing_count; i++) {
                    kv_digits(file, side, &at, i, digits);
                    if (codec->id == C_MINIFLOAT && i == 0) check_elements(file, side, digits);
                }
                if (codec->id == C_OCTAHEDRAL && codec->choice[0]) decode_octahedral(file, side, &at, u);
            }
}
