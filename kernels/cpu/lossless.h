/* lossless: exponents in chunks of rANS, signs and fractions in words (formats/lossless.py). A tile decodes the chunks of its tokens, and
   keeps the last ones, because neighboring tiles share them. */

/* MAX_CHUNKS decoded chunks: their exponents [token][channel], the number of their group within a segment, and the slots of the run. */
struct Chunk {
    const Segment *segment;
    int64_t number;
    uint32_t *slots;
    uint8_t *exponents;
    uint16_t *pairs; /* [pair of channels][TILE]: the exponents of a tile's tokens */
};

/* The streams after a codec's planes. A place contains the first word of a chunk, and the number of all words. */
enum { FREQUENCIES, STATES, CHUNK_PLACES, CHUNK_WORDS };

static int64_t chunk_bytes(const Codec *codec) {
    if (codec->family != LOSSLESS) return 0;
    return (int64_t)sizeof(Chunk) + 4 * RANS_SLOTS + MAX_CHUNKS * codec->group_tokens * codec->dim + 128 + (codec->dim + 1) / 2 * 2 * TILE;
}

/* A chunk without exponents, in memory of `chunk_bytes`. */
static void place_chunk(const Codec *codec, char *memory, Loaded *in) {
    if (codec->family != LOSSLESS) return;
    Chunk *chunk = in->chunk = (Chunk *)memory;
    chunk->segment = NULL;
    chunk->slots = (uint32_t *)(chunk + 1);
    chunk->pairs = (uint16_t *)(chunk->slots + RANS_SLOTS);
    chunk->exponents = (uint8_t *)(chunk->pairs + (codec->dim + 1) / 2 * TILE);
}

/* Fills the slots of frequencies. Their sum was checked with the file; even if it has changed since, every slot gets a value. */
static void fill_slots(const uint16_t *frequencies, int64_t symbols, uint32_t *slots) {
    int64_t at = 0;
    for (int64_t s = 0; s < symbols; s++) {
        int64_t first = at, count = frequencies[s] < RANS_SLOTS - at ? frequencies[s] : RANS_SLOTS - at;
        for (; at < first + count; at++) slots[at] = (uint32_t)(s | (count - 1) << 8 | first << 20);
    }
    memset(slots + at, 0, 4 * (RANS_SLOTS - at));
}

/* Decodes the exponents of a segment's MAX_CHUNKS chunks, beginning with chunk MAX_CHUNKS * number, into memory. */
static void load_chunks(const Codec *codec, const Loaded *in, const Segment *segment, int64_t number) {
    Chunk *chunk = in->chunk;
    const Stream *streams = segment->streams + codec->chunk_stream;
    if (chunk->segment == segment && chunk->number == number) return;
    if (chunk->segment != segment)
        fill_slots((const uint16_t *)row_of(&streams[FREQUENCIES], in->batch, in->head, 0), 1 << (15 - codec->fraction_bits), chunk->slots);
    chunk->segment = segment;
    chunk->number = number;
    RansRun runs[MAX_CHUNKS];
    int count = 0;
    for (int64_t first = MAX_CHUNKS * number; first < MAX_CHUNKS * (number + 1); first++) {
        int64_t left = segment->tokens - first * codec->group_tokens, place[2];
        if (left <= 0) break;
        memcpy(place, row_of(&streams[CHUNK_PLACES], in->batch, in->head, first), sizeof place);
        RansRun *run = &runs[count];
        *run = (RansRun){(const uint16_t *)streams[CHUNK_WORDS].data, place[1], place[0], .slots = chunk->slots};
        run->length = (left < codec->group_tokens ? left : codec->group_tokens) * codec->dim;
        run->next = row_of(segment->streams, in->batch, in->head, first * codec->group_tokens);
        run->symbols = chunk->exponents + count++ * codec->group_tokens * codec->dim;
        memcpy(run->states, row_of(&streams[STATES], in->batch, in->head, first), sizeof run->states);
    }
    rans_decode(runs, count);
}

static void lossless_decode(const Codec *codec, const Loaded *in, float *tile) {
    Chunk *chunk = in->chunk;
    int64_t pairs = (codec->dim + 1) / 2, group = MAX_CHUNKS * codec->group_tokens;
    for (int64_t p = 0; p < in->pieces; p++)
        for (int64_t t = 0, count; t < in->piece[p].count; t += count) {
            int64_t token = in->piece[p].token + t, left = group - token % group;
            count = left < in->piece[p].count - t ? left : in->piece[p].count - t;
            load_chunks(codec, in, in->piece[p].segment, token / group);
            transpose((const char *)chunk->exponents + token % group * codec->dim, codec->dim, count, pairs, chunk->pairs + in->piece[p].at + t);
        }
    for (int64_t i = 0; i < pairs; i++) memset(chunk->pairs + i * TILE + in->tokens, 0, 2 * (TILE - in->tokens));
    int32_t code[TILE], fraction = (int32_t)codec->fraction_bits, sign = 1 << fraction;
    for (int64_t d = 0; d < codec->dim; d++) {
        digits_of(&codec->packing[0], in->words, 0, d, code);
        for (int t = 0; t < TILE; t += LANES) {
            vi own = load_int(code + t), exponent = load_words(chunk->pairs + d / 2 * TILE + t) >> (d % 2 ? 8 : 0) & 0xff;
            vi word = (own & sign) << (15 - fraction) | exponent << fraction | (own & (sign - 1));
            store(tile + d * TILE + t, fraction == 7 ? (vf)(word << 16) : from_half(word));
        }
    }
}
