/* trellis: entries of a table by windows of the token's string, times its norm (formats/trellis.py). */

/* The start of a channel's window: the word, the next word (the string is circular), and the bit. */
typedef struct {
    int64_t word, following;
    int32_t shift;
} Window;

INLINE Window window_of(const Codec *codec, int64_t channel) {
    int64_t words = codec->packing[0].width, length = 16 * words;
    int64_t first = (codec->digit_bits * (channel + 1) - codec->index_bits + length) % length;
    return (Window){first / 16, (first / 16 + 1) % words, (int32_t)(first % 16)};
}

static void trellis_decode(const Codec *codec, const Loaded *in, float *tile) {
    const uint16_t *words = packing_words(codec, in, 0);
    const Table *table = &codec->table[0];
    int32_t mask = (1 << codec->index_bits) - 1;
    for (int64_t channel = 0; channel < codec->dim; channel++) {
        Window window = window_of(codec, channel);
        const uint16_t *low = words + window.word * TILE, *high = words + window.following * TILE;
        float *row = tile + channel * TILE;
        for (int t = 0; t < TILE; t += LANES) {
            vi at = (vi)((vu)(load_words(low + t) | load_words(high + t) << 16) >> (uint32_t)window.shift) & mask;
            store(row + t, lookup(table->data, table->entries, at) * load(in->numbers + t));
        }
    }
}
