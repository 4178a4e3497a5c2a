/* The codec klt: a mean plus a sum of matrix rows. */
#include "kvpack.h"

#include <stdio.h>

static unsigned width_of(const kv_codec *codec, uint64_t head, unsigned j) {
    unsigned halves = (codec->dim + 7) / 8;
    return codec->widths.data[codec->choice[3] ? head * halves + j / 8 : j / 16];
}

/* The codes of a token's head with widths of heads; checks the bits of no coordinate (rule klt-11). */
static void read_codes(kv_file *file, const kv_side *side, const kv_place *at, uint32_t *codes) {
    const kv_codec *codec = side->codec;
    const kv_tensor *stream = kv_stream(side, "codes");
    const uint8_t *bytes = stream->data + (at->sequence * side->packed + at->token) * codec->bins;
    for (uint64_t head = 0; head <= at->head; head++)
        for (unsigned j = 0; j < codec->dim; j += 8) {
            unsigned width = width_of(codec, head, j), n = codec->dim - j < 8 ? codec->dim - j : 8;
            unsigned size = (n * width + 7) / 8;
            uint64_t word = kv_little(bytes, (int)size);
            bytes += size;
            if (head < at->head) continue;
            if (n * width < 64 && word >> n * width)
                kv_fail(file->reader, INVALID_PAYLOAD, "klt-11", "a bit of no coordinate is set");
            for (unsigned k = 0; k < n; k++)
                codes[j + k] = (uint32_t)(word >> k * width & ((1u << width) - 1));
        }
}

/* The codes of all coordinates of a token's head. */
static void all_codes(kv_file *file, const kv_side *side, const kv_place *at, uint32_t *codes) {
    const kv_codec *codec = side->codec;
    if (codec->choice[3]) {
        read_codes(file, side, at, codes);
        return;
    }
    for (unsigned i = 0, width = 1; width <= 8; width++) {
        char name[12];
        uint32_t digits[1024];
        unsigned next = 0;
        snprintf(name, sizeof name, "codes_%u", width);
        if (i == codec->packing_count || codec->packings[i].name[6] != name[6] ||
            codec->packings[i].name[5] != '_')
            continue;
        kv_digits(file, side, at, i++, digits);
        for (unsigned j = 0; j < codec->dim; j++)
            if (width_of(codec, at->head, j) == width) codes[j] = digits[next++];
    }
}

void kv_check_klt(kv_file *file, kv_side *side) {
    uint32_t codes[1024];
    kv_place at = {0};
    for (at.sequence = 0; side->codec->choice[3] && at.sequence < side->batch; at.sequence++)
        for (at.head = 0; at.head < side->heads; at.head++)
            for (at.token = 0; at.token < side->packed; at.token++) read_codes(file, side, &at, codes);
}

/* Where a head's vectors are: a stream of the side, or the side of the basis. */
static const kv_tensor *find_vectors(kv_file *file, const kv_side *side) {
    kv_reader *r = file->reader;
    const kv_codec *codec = side->codec;
    if (codec->choice[1]) return kv_stream(side, "rows");
    kv_file *basis = kv_basis(file, codec->basis, "klt-5");
    const kv_side *found =
        codec->layer < basis->layer_count ? basis->layers[codec->layer].sides[codec->choice[0]] : NULL;
    if (!found) kv_fail(r, INVALID_HEADER, "klt-6", "the basis has no such side");
    if (found->codec->dim != codec->dim || found->heads != side->heads)
        kv_fail(r, INVALID_HEADER, "klt-7", "the side of the basis has other heads");
    return kv_stream(found, "values");
}

void kv_decode_klt(kv_file *file, kv_side *side) {
    const kv_codec *codec = side->codec;
    const kv_tensor *vectors = find_vectors(file, side);
    unsigned dim = codec->dim;
    bool own = codec->choice[1];
    uint64_t rows = own ? kv_basis_vectors(dim) : vectors->shape[2];
    side->early = kv_take(file->reader, kv_times(kv_times(side->batch * side->heads, side->packed), dim),
                          sizeof(float));
    float *to = side->early;
    kv_place at = {0};
    for (at.sequence = 0; side->packed && at.sequence < side->batch; at.sequence++)
        for (at.head = 0; at.head < side->heads; at.head++) {
            at.token = 0;
            for (at.run = 0; at.run < side->run_count; at.run++)
                for (at.in_run = 0; at.in_run < side->runs[at.run]; at.in_run++, at.token++, to += dim) {
                    uint64_t row = own ? kv_at(side, &at, side->run_count, at.run) : at.head,
                             first = row * rows * dim;
                    float gain = codec->choice[2] ? kv_per_token(side, &at, "gain") : 1;
                    uint32_t codes[1024];
                    double u[1024];
                    all_codes(file, side, &at, codes);
                    for (unsigned j = 0; j < dim; j++) {
                        unsigned w = width_of(codec, at.head, j);
                        uint64_t index = first + (2 + (uint64_t)dim) * dim + 510 * (j / 16) + (1u << w) - 2;
                        u[j] = 256.0 * kv_number(vectors->dtype, vectors->data, first + j);
                        if (w)
                            u[j] += (double)kv_number(vectors->dtype, vectors->data, index + codes[j]) * gain;
                    }
                    for (unsigned c = 0; c < dim; c++) {
                        double sum = 0;
                        for (unsigned j = 0; j < dim; j++)
                            sum += u[j] * kv_number(vectors->dtype, vectors->data,
                                                    first + (1 + (uint64_t)j) * dim + c);
                        to[c] = (float)sum;
                    }
                }
        }
}
