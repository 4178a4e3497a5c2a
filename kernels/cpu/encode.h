/* One item of encoding: some tokens of one head, tile by tile, to the streams of formats/. */

/* Channels whose squares are added before they join the others': sums of sums round less. */
enum { CHANNELS_ADDED = 16 };

/* Values of `count` tokens, transposed, times the rotation's factors, and their norms; zero beyond the last token. */
static void read_tile(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t count, const Encoded *out) {
    int64_t dim = call->codec->dim, halves = call->dtype == F32 ? 2 : 1;
    uint16_t *words = (uint16_t *)out->spare;
    float sum[TILE] = {0};
    transpose(row_of(&call->x, batch, head, start), call->x.row, count, halves * dim, words);
    for (int64_t w = 0; w < halves * dim && count < TILE; w++) memset(words + w * TILE + count, 0, 2 * (TILE - count));
    for (int64_t first = 0; first < dim; first += CHANNELS_ADDED) {
        int64_t end = first + CHANNELS_ADDED < dim ? first + CHANNELS_ADDED : dim;
        for (int64_t t = 0; t < out->tokens; t += LANES) {
            vf part = splat(0);
            for (int64_t d = first; d < end; d++) {
                vi x = load_words(words + halves * d * TILE + t);
                vf value = call->dtype == F16 ? from_half(x) : (vf)(call->dtype == BF16 ? x << 16 : x | load_words(words + (2 * d + 1) * TILE + t) << 16);
                part += value * value;
                store(out->tile + d * TILE + t, call->rotation.order ? value * call->rotation.factors[d] : value);
            }
            store(sum + t, load(sum + t) + part);
        }
    }
    memset(out->tile + dim * TILE, 0, sizeof(float) * 3 * TILE);
    for (int64_t t = 0; t < out->tokens; t += LANES) store(out->norm + t, square_root(load(sum + t)));
}

/* Whether every norm is that of zeros, or far from where squares leave binary32 and from what it is stored in; after read_tile. */
static int norms_fit(const Encode *call, const Encoded *out) {
    const uint16_t *words = (const uint16_t *)out->spare;
    int64_t halves = call->dtype == F32 ? 2 : 1;
    float limit = call->codec->values[0].dtype == F16 ? 65520.f : 0x1p60f;
    for (int64_t t = 0; t < out->tokens; t++) {
        if (out->norm[t] > 0x1p-40f && out->norm[t] < limit) continue;
        for (int64_t w = 0; w < halves * call->codec->dim; w++)
            if (words[w * TILE + t] & (w % halves == halves - 1 ? 0x7fff : 0xffff)) return 0;
    }
    return 1;
}

static int encode_tile(const Encode *call, const Encoded *out) {
    switch (call->codec->family) {
        case SCALAR: scalar_encode(call, out); return 1;
        case OCTAHEDRAL: octahedral_encode(call, out); return 1;
        case QUATERNION: quaternion_encode(call, out); return 1;
        case ANGLE: return angle_encode(call, out);
        default: return 0;
    }
}

/* Tokens [start, stop) of one head, from the first of a token group on; false where formats/ is to encode, or to refuse a value. */
static int encode_item(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t stop, Encoded *out) {
    const Codec *codec = call->codec;
    if (codec->family == GROUP) return encode_groups(call, batch, head, start, stop, out->spare);
    for (; start < stop; start += TILE) {
        int64_t count = stop - start < TILE ? stop - start : TILE;
        out->tokens = (count + LANES - 1) / LANES * LANES;
        read_tile(call, batch, head, start, count, out);
        if (!norms_fit(call, out)) return 0;
        rotate(&call->rotation, codec->dim, out->tokens, out->tile, out->spare);
        memset(out->words, 0, 2 * TILE * codec->columns);
        if (!encode_tile(call, out)) return 0;
        write_streams(call, out, batch, head, start, count);
    }
    return 1;
}
