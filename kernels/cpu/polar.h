/* polar: radii become pairs of radii, level by level, and at last channels (formats/polar.py). */

/* Decodes row `a` of a level: the radius times the cosine and the sine of its angle. The two kinds of pairs have separate tables. */
static void polar_level(const Codec *codec, const Loaded *in, int64_t level, const float *radii, float *pairs) {
    int32_t code[TILE];
    int64_t stream = codec->level_stream[level];
    const uint16_t *words = packing_words(codec, in, stream);
    for (int64_t a = 0; a < codec->level_angles[level]; a++) {
        const Table *cosine = &codec->table[4 * level + (a < codec->level_equal[level] ? 0 : 2)], *sine = cosine + 1;
        digits_of(&codec->packing[stream], words, 0, codec->level_first[level] + a, code);
        for (int t = 0; t < TILE; t += LANES) {
            vi at = load_int(code + t);
            vf radius = load(radii + a * TILE + t);
            store(pairs + 2 * a * TILE + t, radius * lookup(cosine->data, cosine->entries, at));
            store(pairs + (2 * a + 1) * TILE + t, radius * lookup(sine->data, sine->entries, at));
        }
    }
}

static void polar_decode(const Codec *codec, const Loaded *in, float *spare, float *tile) {
    const float *radii = in->numbers;
    int64_t count = codec->radii;
    for (int64_t level = codec->levels - 1; level >= 0; level--) {
        /* Levels alternate between the two buffers, so that the last level writes the tile. */
        float *pairs = level % 2 ? spare : tile;
        int64_t angles = codec->level_angles[level];
        polar_level(codec, in, level, radii, pairs);
        memcpy(pairs + 2 * angles * TILE, radii + angles * TILE, sizeof(float) * TILE * (count - angles));
        radii = pairs;
        count += angles;
    }
}
