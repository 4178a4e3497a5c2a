/* The kernels of one instruction set: level_*.c each compile this file, with LEVEL, NAME (of the table at the end) and TITLE. */
#ifndef __clang__
/* Without these options, copies of functions and loops for special cases make the library 8 % larger, and no kernel faster. */
#pragma GCC optimize("no-ipa-cp-clone", "no-peel-loops", "no-split-loops", "no-split-paths", "no-unswitch-loops")
#endif
#include "interface.h"
#include "level.h"
#include "vectors.h"

#include "transpose.h"
#include "words.h"

#include "angle.h"
#include "exponents.h"
#include "group.h"
#include "klt.h"
#include "minifloat.h"
#include "octahedral.h"
#include "polar.h"
#include "quaternion.h"
#include "rans.h"
#include "lossless.h"
#include "raw.h"
#include "scalar.h"
#include "trellis.h"

/* In the code above, no product is contracted with a sum, so values equal those of formats/ bit for bit wherever no sum is involved. */
#include "rotation.h"
#include "sidecars.h"

#include "decode.h"
#include "rows.h"

#include "group_rows.h"

#include "columns.h"
#include "encode_group.h"
#include "encode_group_rows.h"
#include "encode_minifloat.h"
#include "measure.h"

#ifdef __clang__
#pragma clang fp contract(fast)
#else
#pragma GCC optimize("fp-contract=fast")
#endif
#include "group_fused.h"
#include "angle_fused.h"
#include "klt_rows.h"
#include "loops.h"
#include "row_fused.h"
#include "unpack.h"

#include "attend.h"

#include "encode_angle.h"
#include "encode_octahedral.h"
#include "encode_polar.h"
#include "encode_quaternion.h"
#include "encode_scalar.h"
#include "encode_trellis.h"

#include "encode.h"
#include "norms.h"
#include "sizes.h"

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t loaded_bytes(const Codec *codec) {
    return TILE * (2 * larger_of(codec->columns + codec->numbers, 1) + 4 * larger_of(codec->numbers, 1)) + chunk_bytes(codec) + 192;
}

static char *aligned(char *memory) { return (char *)(((uintptr_t)memory + 63) / 64 * 64); }

static char *place_loaded(const Codec *codec, char *memory, Loaded *in) {
    memory = aligned(memory);
    in->numbers = (float *)memory;
    memory += 4 * TILE * larger_of(codec->numbers, 1);
    in->words = (uint16_t *)memory;
    memory = aligned(memory + 2 * TILE * larger_of(codec->columns + codec->numbers, 1));
    place_chunk(codec, memory, in);
    return memory + chunk_bytes(codec);
}

/* The spare memory of a decoder in floats: scales of every run, weights of every group and query, or two tiles. */
static int64_t spare_floats(int64_t dim) { return 2 * dim * TILE + 8 * TILE; }

static int64_t attend_bytes(const Attend *call) {
    int64_t most = 0;
    for (int64_t i = 0; i < call->span_count; i++) {
        const Codec *k = call->spans[i].k.codec, *v = call->spans[i].v.codec;
        int64_t dim = larger_of(k->dim, v->dim);
        int64_t floats = ROW_SPACE * (k->dim + TILE) + dim * TILE + spare_floats(dim);
        most = larger_of(most, loaded_bytes(k) + loaded_bytes(v) + 4 * floats + 512);
    }
    return most + (int64_t)sizeof(Scratch);
}

static void attend_in(const Attend *call, const Item *item, char *memory, float *largest, float *total, float *sums) {
    const Codec *k = item->span->k.codec, *v = item->span->v.codec;
    Scratch *scratch = (Scratch *)memory;
    memory = place_loaded(k, memory + sizeof(Scratch), &scratch->k);
    memory = aligned(place_loaded(v, memory, &scratch->v));
    int64_t dim = larger_of(k->dim, v->dim);
    scratch->tile = (float *)memory;
    scratch->scores = scratch->tile + dim * TILE;
    scratch->spare = scratch->scores + ROW_SPACE * TILE;
    scratch->queries = scratch->spare + spare_floats(dim);
    attend_item(call, item, scratch, largest, total, sums);
}

static int64_t unpack_bytes(const Unpack *call) {
    int64_t dim = call->side.codec->dim;
    return loaded_bytes(call->side.codec) + 4 * (dim * TILE + spare_floats(dim)) + (int64_t)sizeof(Loaded) + 256;
}

static void unpack_in(const Unpack *call, int64_t batch, int64_t head, int64_t start, int64_t stop, char *memory) {
    Loaded *in = (Loaded *)memory;
    float *tile = (float *)aligned(place_loaded(call->side.codec, memory + sizeof(Loaded), in));
    unpack_item(call, batch, head, start, stop, in, tile, tile + call->side.codec->dim * TILE);
}

static int64_t encode_bytes(const Encode *call) {
    const Codec *codec = call->codec;
    int64_t of_groups = larger_of(codec->size + 4, 6 * TOKENS_OF_GROUPS) * (codec->dim + LANES);
    int64_t tile = HALF_TILE * ((codec->dim + 3) + 2 + codec->numbers + 2 * codec->dim) + HALF_TILE * codec->columns / 2;
    return 4 * larger_of(of_groups, tile) + search_bytes(codec) + (int64_t)sizeof(Encoded) + 128;
}

static int encode_in(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t stop, char *memory) {
    const Codec *codec = call->codec;
    Encoded *out = (Encoded *)memory;
    out->spare = (float *)aligned(memory + sizeof(Encoded));
    out->tile = out->spare + 2 * codec->dim * HALF_TILE;
    out->norm = out->tile + (codec->dim + 3) * HALF_TILE;
    out->errors = out->norm + HALF_TILE;
    out->numbers = out->errors + HALF_TILE;
    out->words = (uint16_t *)(out->numbers + codec->numbers * HALF_TILE);
    out->space = aligned((char *)(out->words + HALF_TILE * codec->columns));
    return encode_item(call, batch, head, start, stop, out);
}

const Level NAME = {TITLE, attend_bytes, attend_in, unpack_bytes, unpack_in, encode_bytes, encode_in, measure_page, layer_norms, have_large, rans_chunks, rans_encode_chunks, join_tokens, split_tokens, count_exponents};
