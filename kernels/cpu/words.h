/* Loading of one tile from segments: words and numbers of any strides are transposed to rows of TILE tokens, and digits are extracted. In
   this layout, a vector contains the same field of LANES tokens, so that one shift and one mask extract all of them. */

INLINE char *row_of(const Stream *stream, int64_t batch, int64_t head, int64_t row) {
    return (char *)stream->data + batch * stream->batch + head * stream->head + row * stream->row;
}

/* Tokens [at, at + count) of the tile are in one segment, beginning with its token `token`. */
typedef struct {
    int64_t at, count, token;
    const Segment *segment;
} Piece;

/* Tokens [at, at + count) share a row of scales along tokens, which are `pairs` of binary16 numbers, or bytes that `table` maps to such
   pairs. */
typedef struct {
    int64_t at, count;
    const char *pairs, *table;
} Run;

/* A token of the tile whose decoded values are replaced by these values, in the coded frame. */
typedef struct {
    int64_t at;
    const char *values;
} Patch;

/* A token's outlier chunks, OUTLIER_BYTES each: four values in binary16, and the chunk's number. */
typedef struct {
    const char *chunks;
    int64_t count;
} Outliers;

/* Chunks that lossless.h has decoded. */
typedef struct Chunk Chunk;

/* The words and numbers of one tile. Those after the last token are zero. */
typedef struct {
    int64_t batch, head, tokens, pieces, runs, patches;
    Piece piece[TILE];
    Run run[TILE];
    Patch patch[TILE];
    Outliers outliers[TILE];
    uint16_t *words; /* [column of all packings, plane by plane][TILE] */
    float *numbers;  /* [number][TILE] */
    Chunk *chunk;    /* lossless only */
} Loaded;

/* Loads the words of one packing for `count` tokens, from column `at` of the tile on. Returns the number of words per token. */
static int64_t load_packing(const Packing *packing, const Stream *streams, int64_t batch, int64_t head, const Piece *piece, uint16_t *out) {
    for (int64_t plane = 0; plane < packing->planes; plane++) {
        const Stream *s = streams + plane;
        const char *rows = s->data + batch * s->batch + head * s->head + piece->token * s->row;
        uint16_t *to = out + plane * packing->width * TILE + piece->at;
        if (!packing->odd || plane + 1 < packing->planes) {
            transpose(rows, s->row, piece->count, packing->width, to);
            continue;
        }
        int64_t words = (packing->width + 1) / 2;
        transpose(rows, s->row, piece->count, words, to);
        for (int64_t w = 0; w < words; w++)
            for (int64_t t = 0; t < piece->count; t++) {
                uint16_t both = to[w * TILE + t];
                to[w * TILE + t] = both & 255;
                if (w + words < packing->width) to[(w + words) * TILE + t] = both >> 8;
            }
    }
    return packing->planes * packing->width;
}

/* Numbers of 32 bits, or bytes. */
static void load_numbers(const Values *values, const Stream *s, const char *table, int64_t batch, int64_t head, const Piece *piece,
                         float *out) {
    const char *rows = s->data + batch * s->batch + head * s->head + piece->token * s->row;
    for (int64_t i = 0; i < values->count; i++)
        for (int64_t t = 0; t < piece->count; t++) {
            const char *row = rows + t * s->row;
            float *to = out + i * TILE + piece->at + t;
            if (values->dtype == F32)
                memcpy(to, row + 4 * i, 4);
            else if (values->dtype == LOG8)
                *to = values->table[(uint8_t)row[i]];
            else
                *to = table ? half(word_at(table + 4 * (uint8_t)row[i] + 2 * (i & 1))) : (float)(uint8_t)row[i];
        }
}

/* Does the same for 16-bit numbers, which are transposed as words and then widened. `words` has room for the numbers of one tile. */
static void load_word_numbers(const Values *values, const Stream *s, int64_t batch, int64_t head, const Piece *piece, uint16_t *words, float *out) {
    transpose(s->data + batch * s->batch + head * s->head + piece->token * s->row, s->row, piece->count, values->count, words);
    for (int64_t i = 0; i < values->count; i++) {
        int64_t t = 0;
        float *to = out + i * TILE + piece->at;
        for (; t + LANES <= piece->count; t += LANES) {
            vi x = load_words(words + i * TILE + t);
            store(to + t, values->dtype == F16 ? from_half(x) : (vf)(x << 16));
        }
        for (; t < piece->count; t++) {
            uint32_t bits = (uint32_t)words[i * TILE + t] << 16;
            if (values->dtype == F16)
                to[t] = half(words[i * TILE + t]);
            else
                memcpy(to + t, &bits, 4);
        }
    }
}

static void load_runs(const Codec *codec, int64_t batch, int64_t head, const Piece *piece, Loaded *tile) {
    const Stream *s = piece->segment->streams + codec->scales_stream;
    const Stream *table = codec->table_stream < 0 ? 0 : piece->segment->streams + codec->table_stream;
    for (int64_t t = 0; t < piece->count;) {
        int64_t token = piece->token + t, left = codec->size - token % codec->size;
        Run *run = &tile->run[tile->runs++];
        run->at = piece->at + t;
        run->count = left < piece->count - t ? left : piece->count - t;
        run->pairs = s->data + batch * s->batch + head * s->head + token / codec->size * s->row;
        run->table = table ? table->data + batch * table->batch + head * table->head : 0;
        t += run->count;
    }
}

static void load_patches(const Codec *codec, int64_t batch, int64_t head, const Piece *piece, Loaded *tile) {
    const Stream *entry = piece->segment->streams + codec->patch_stream, *values = entry + 1;
    const char *numbers = entry->data + batch * entry->batch + piece->token * entry->row;
    int32_t number, every = -1;
    if (entry->row == 4) {
        /* Raw tokens are rare: most pieces have none. */
        for (int64_t t = 0; t < piece->count; t++) {
            memcpy(&number, numbers + 4 * t, 4);
            every &= number;
        }
        if (every == -1) return;
    }
    for (int64_t t = 0; t < piece->count; t++) {
        memcpy(&number, numbers + t * entry->row, 4);
        if (number >= 0) tile->patch[tile->patches++] = (Patch){piece->at + t, values->data + head * values->head + number * values->row};
    }
}

static void load_outliers(const Codec *codec, int64_t batch, int64_t head, const Piece *piece, Loaded *tile) {
    const Stream *first = piece->segment->streams + codec->outlier_stream, *chunks = first + 1;
    const char *firsts = first->data + batch * first->batch + head * first->head + piece->token * first->row;
    for (int64_t t = 0; t < piece->count; t++) {
        int64_t ends[2];
        memcpy(ends, firsts + t * first->row, sizeof ends);
        tile->outliers[piece->at + t] = (Outliers){chunks->data + ends[0] * chunks->row, ends[1] - ends[0]};
    }
}

INLINE const Segment *segment_of(const Side *side, int64_t number) {
    return (const Segment *)(side->segments + number * (2 + 4 * side->codec->streams));
}

/* The number of the segment that contains `token`. */
static int64_t find_segment(const Side *side, int64_t token) {
    int64_t low = 0, high = side->count - 1;
    while (low < high) {
        int64_t middle = (low + high + 1) / 2;
        if (segment_of(side, middle)->first <= token)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* Finds the segments that contain tokens [start, start + count). `number` is the index of the first one, and becomes that of the next tile.
   */
static void find_pieces(const Side *side, int64_t start, int64_t count, int64_t *number, Loaded *tile) {
    tile->tokens = count;
    tile->pieces = 0;
    for (int64_t t = 0; t < count;) {
        const Segment *segment = segment_of(side, *number);
        int64_t token = start + t - segment->first, left = segment->tokens - token;
        Piece *piece = &tile->piece[tile->pieces++];
        *piece = (Piece){t, left < count - t ? left : count - t, token, segment};
        t += piece->count;
        if (piece->count == left) ++*number;
    }
}

enum { CACHE_LINE = 64 };

/* The bytes of one token. */
static int64_t bytes_of(const Values *values) { return values->count * (values->dtype == F32 ? 4 : values->dtype >= U8 ? 1 : 2); }

static void prefetch_rows(const Stream *stream, int64_t batch, int64_t head, int64_t first, int64_t rows, int64_t bytes) {
    int64_t step = stream->row > 0 && stream->row < CACHE_LINE ? CACHE_LINE / stream->row : 1;
    for (int64_t r = first; r < first + rows; r += step)
        for (int64_t b = 0; b < bytes; b += CACHE_LINE) __builtin_prefetch(row_of(stream, batch, head, r) + b, 0, 2);
}

/* Prefetches the rows of the tile that starts with token `start` to the second-level cache. `number` is its first segment. Rows that are
   multiplied as they are stored need no prefetching, because the processor itself reads ahead of the rows that it has read. */
static void prefetch_segments(const Side *side, int64_t batch, int64_t head, int64_t start, int64_t number) {
    const Codec *codec = side->codec;
    for (; number < side->count && segment_of(side, number)->first < start + TILE; number++) {
        const Segment *segment = segment_of(side, number);
        int64_t from = start > segment->first ? start - segment->first : 0, left = start + TILE - segment->first;
        if (from && (codec->family == RAW || codec->family == LOSSLESS)) continue;
        int64_t count = (segment->tokens < left ? segment->tokens : left) - from;
        const Stream *stream = segment->streams;
        for (int64_t i = 0; i < codec->packings + codec->sketches; i++)
            for (int64_t plane = 0; plane < codec->packing[i].planes; plane++)
                prefetch_rows(stream++, batch, head, from, count, 2 * codec->packing[i].width);
        for (int64_t i = 0; i < codec->value_streams; i++) prefetch_rows(stream++, batch, head, from, count, bytes_of(&codec->values[i]));
        if (codec->scales_stream >= 0)
            prefetch_rows(segment->streams + codec->scales_stream, batch, head, from / codec->size, (count + codec->size - 1) / codec->size, 4 * codec->dim);
    }
}

/* Loads the words of the tile's pieces, unless the caller reads them as they are stored, and the numbers. */
static void load_tile(const Codec *codec, int with_words, Loaded *tile) {
    int64_t batch = tile->batch, head = tile->head;
    tile->runs = tile->patches = 0;
    for (int64_t p = 0; p < tile->pieces; p++) {
        const Piece *piece = &tile->piece[p];
        const Stream *streams = piece->segment->streams;
        uint16_t *words = tile->words;
        for (int64_t i = 0; i < codec->packings + codec->sketches; i++) {
            if (with_words) words += TILE * load_packing(&codec->packing[i], streams, batch, head, piece, words);
            streams += codec->packing[i].planes;
        }
        float *numbers = tile->numbers;
        for (int64_t i = 0; i < codec->value_streams; i++) {
            const Values *values = &codec->values[i];
            const Stream *table = codec->table_stream < 0 ? 0 : piece->segment->streams + codec->table_stream;
            const char *pairs = table ? table->data + batch * table->batch + head * table->head : 0;
            if (values->dtype <= BF16)
                load_word_numbers(values, streams, batch, head, piece, tile->words + codec->columns * TILE, numbers);
            else
                load_numbers(values, streams, pairs, batch, head, piece, numbers);
            numbers += values->count * TILE;
            streams++;
        }
        if (codec->scales_stream >= 0) load_runs(codec, batch, head, piece, tile);
        if (codec->patch_stream >= 0) load_patches(codec, batch, head, piece, tile);
        if (codec->outlier_stream >= 0) load_outliers(codec, batch, head, piece, tile);
    }
    if (tile->tokens == TILE) return;
    for (int64_t i = 0; with_words && i < codec->columns; i++)
        memset(tile->words + i * TILE + tile->tokens, 0, 2 * (TILE - tile->tokens));
    for (int64_t i = 0; i < codec->numbers; i++) memset(tile->numbers + i * TILE + tile->tokens, 0, 4 * (TILE - tile->tokens));
}

/* The columns of the packings before `number`. */
INLINE int64_t columns_before(const Codec *codec, int64_t number) {
    int64_t columns = 0;
    for (int64_t i = 0; i < number; i++) columns += codec->packing[i].planes * codec->packing[i].width;
    return columns;
}

INLINE const uint16_t *packing_words(const Codec *codec, const Loaded *tile, int64_t number) {
    return tile->words + columns_before(codec, number) * TILE;
}

/* Extracts a digit of symbol `symbol` for every token. It is below the digit's base, whatever the words contain. */
static void digits_of(const Packing *packing, const uint16_t *words, int64_t digit, int64_t symbol, int32_t *out) {
    int64_t column = symbol % packing->width, field = symbol / packing->width, plane = packing->width * TILE;
    const Digit *d = &packing->digit[digit];
    words += column * TILE;
    if (packing->binary) {
        int64_t place = d->place + field * d->bits, word = place / 16, shift = place % 16;
        const uint16_t *low = words + word * plane;
        int32_t mask = (int32_t)(d->base - 1);
        if (shift + d->bits <= 16)
            for (int t = 0; t < TILE; t += LANES) store_int(out + t, load_words(low + t) >> (int32_t)shift & mask);
        else
            for (int t = 0; t < TILE; t += LANES)
                store_int(out + t, (vi)((vu)(load_words(low + t) | load_words(low + plane + t) << 16) >> (uint32_t)shift) & mask);
        return;
    }
    double weight = d->weight;
    for (int64_t k = 0; k < field; k++) weight *= (double)d->base;
    if (packing->planes == 1) {
        /* This is exact, because a word is below 2^16, and adding a half keeps every quotient away from integers. */
        float per_whole = (float)(1 / (weight * (double)d->base)), base = (float)d->base;
        for (int t = 0; t < TILE; t += LANES) {
            vf whole = (to_float(load_words(words + t)) + .5f) * per_whole;
            store_int(out + t, to_int((whole - to_float(to_int(whole))) * base));
        }
        return;
    }
    for (int t = 0; t < TILE; t++) {
        uint64_t value = 0;
        for (int64_t p = packing->planes - 1; p >= 0; p--) value = value << 16 | words[p * plane + t];
        out[t] = (int32_t)(value / (uint64_t)weight % (uint64_t)d->base);
    }
}

/* found[j] = data[index[t] + j] of LANES tokens: four floats are loaded for each, and turned. */
INLINE void lookup_four(const float *data, const int32_t *index, vf *found) {
    vf a[4], b[4];
    for (int i = 0; i < 4; i++) a[i] = load_fours(data, index + i);
    for (int i = 0; i < 2; i++) {
        b[2 * i] = SHUFFLE(vf, vi, a[i], a[i + 2], LOW_OF_FOUR);
        b[2 * i + 1] = SHUFFLE(vf, vi, a[i], a[i + 2], HIGH_OF_FOUR);
    }
    for (int i = 0; i < 2; i++) {
        found[2 * i] = SHUFFLE(vf, vi, b[i], b[i + 2], LOW_OF_FOUR);
        found[2 * i + 1] = SHUFFLE(vf, vi, b[i], b[i + 2], HIGH_OF_FOUR);
    }
}
