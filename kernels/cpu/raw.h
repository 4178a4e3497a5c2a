/* raw: unmodified values (formats/raw.py), and the raw tail. */

static void raw_decode(const Codec *codec, const Loaded *in, float *tile) {
    memcpy(tile, in->numbers, sizeof(float) * TILE * codec->dim);
}
