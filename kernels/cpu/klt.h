/* klt: each value is an entry of the table of a run of columns, times the token's gain, plus the mean (formats/klt.py). If the cache
   contains rows of a basis, these belong to a head and to a run of tokens. They consist of the mean [dim], tables, and the matrix
   [dim][dim] from `matrix_place` on. */

/* Tokens [at, at + count) of the tile, which have the same rows of a basis. */
typedef struct {
    int64_t at, count;
    const float *rows;
} BasisTokens;

static BasisTokens basis_tokens(const Loaded *in, int64_t *run) {
    BasisTokens found = {in->run[*run].at, 0, (const float *)in->run[*run].pairs};
    for (; *run < in->runs && (const float *)in->run[*run].pairs == found.rows; ++*run) found.count += in->run[*run].count;
    /* The columns after the last token are unused, and may be decoded with any rows. */
    if (*run == in->runs) found.count = TILE - found.at;
    return found;
}

/* Extracts the codes of a run of `width` bits for every token. `codes` is [8][TILE]. */
INLINE void head_codes(const Codec *codec, const Loaded *in, int64_t byte, const int64_t width, int32_t *codes) {
    uint64_t words[TILE] = {0};
    for (int64_t p = 0; p < in->pieces; p++) {
        const Piece *piece = &in->piece[p];
        const Stream *stream = piece->segment->streams + codec->heads_stream;
        const char *from = row_of(stream, in->batch, in->head, piece->token) + byte;
        /* The first bytes are the lowest ones, as on every machine for which this is compiled. */
        for (int64_t t = 0; t < piece->count; t++) memcpy(words + piece->at + t, from + t * stream->row, width);
    }
    for (int64_t j = 0; j < 8; j++)
        for (int64_t t = 0; t < TILE; t++) codes[j * TILE + t] = (int32_t)(words[t] >> j * width & ((1 << width) - 1));
}

static void all_head_codes(const Codec *codec, const Loaded *in, int64_t byte, int64_t width, int64_t columns, int32_t *codes) {
    /* A run of fewer columns has fewer bytes. */
    if (columns < 8) {
        int64_t bytes = (columns * width + 7) / 8;
        uint64_t words[TILE] = {0};
        for (int64_t p = 0; p < in->pieces; p++) {
            const Piece *piece = &in->piece[p];
            const Stream *stream = piece->segment->streams + codec->heads_stream;
            const char *from = row_of(stream, in->batch, in->head, piece->token) + byte;
            for (int64_t t = 0; t < piece->count; t++) memcpy(words + piece->at + t, from + t * stream->row, bytes);
        }
        for (int64_t j = 0; j < columns; j++)
            for (int64_t t = 0; t < TILE; t++) codes[j * TILE + t] = (int32_t)(words[t] >> j * width & ((1 << width) - 1));
        return;
    }
    switch (width) {
        case 1: head_codes(codec, in, byte, 1, codes); break;
        case 2: head_codes(codec, in, byte, 2, codes); break;
        case 3: head_codes(codec, in, byte, 3, codes); break;
        case 4: head_codes(codec, in, byte, 4, codes); break;
        case 5: head_codes(codec, in, byte, 5, codes); break;
        case 6: head_codes(codec, in, byte, 6, codes); break;
        case 7: head_codes(codec, in, byte, 7, codes); break;
        default: head_codes(codec, in, byte, 8, codes);
    }
}

/* Decodes the columns of heads that have widths of their own. */
static void klt_decode_heads(const Codec *codec, const Loaded *in, float *tile) {
    int32_t codes[8 * TILE];
    const int32_t *found = codec->channels + codec->channels[in->head], *end = codec->channels + codec->channels[in->head + 1];
    for (int64_t run = 0; run < in->runs;) {
        BasisTokens own = basis_tokens(in, &run);
        for (int64_t d = 0; d < codec->dim; d++)
            for (int64_t t = own.at; t < own.at + own.count; t++) tile[d * TILE + t] = own.rows[d];
    }
    for (; found < end; found += HEAD_RUN) {
        int64_t width = found[1], first = found[2], columns = found[3];
        int64_t entries = 1 << width < MIN_ENTRIES ? MIN_ENTRIES : 1 << width;
        all_head_codes(codec, in, found[0], width, columns, codes);
        for (int64_t run = 0; run < in->runs;) {
            BasisTokens own = basis_tokens(in, &run);
            const float *table = own.rows + found[4];
            for (int64_t j = 0; j < columns; j++) {
                float mean = own.rows[first + j], values[TILE], *to = tile + (first + j) * TILE;
                for (int t = 0; t < TILE; t += LANES) {
                    vf value = lookup(table, entries, load_int(codes + j * TILE + t));
                    if (codec->value_streams) value = value * load(in->numbers + t);
                    store(values + t, value + mean);
                }
                memcpy(to + own.at, values + own.at, sizeof(float) * own.count);
            }
        }
    }
}

/* `channels` holds the channel of every symbol of all packings in turn, and then the place of its table. */
static void klt_decode(const Codec *codec, const Loaded *in, float *tile) {
    if (codec->heads_stream >= 0) {
        klt_decode_heads(codec, in, tile);
        return;
    }
    int32_t code[TILE];
    float found[TILE];
    int64_t symbols = 0;
    for (int64_t part = 0; part < codec->packings; part++) symbols += codec->packing[part].symbols;
    for (int64_t run = 0; run < in->runs;) {
        BasisTokens own = basis_tokens(in, &run);
        for (int64_t d = 0; d < codec->dim; d++)
            for (int64_t t = own.at; t < own.at + own.count; t++) tile[d * TILE + t] = own.rows[d];
        const int32_t *channel = codec->channels;
        for (int64_t part = 0; part < codec->packings; part++) {
            const Packing *packing = &codec->packing[part];
            const uint16_t *words = packing_words(codec, in, part);
            int64_t entries = packing->digit[0].base < MIN_ENTRIES ? MIN_ENTRIES : packing->digit[0].base;
            for (int64_t i = 0; i < packing->symbols; i++, channel++) {
                const float *table = own.rows + channel[symbols];
                float mean = own.rows[*channel], *to = own.count == TILE ? tile + *channel * TILE : found;
                digits_of(packing, words, 0, i, code);
                for (int t = 0; t < TILE; t += LANES) {
                    vf value = lookup(table, entries, load_int(code + t));
                    if (codec->value_streams) value = value * load(in->numbers + t);
                    store(to + t, value + mean);
                }
                if (own.count < TILE) memcpy(tile + *channel * TILE + own.at, found + own.at, sizeof(float) * own.count);
            }
        }
    }
}
