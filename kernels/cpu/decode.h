/* Calls the decoder of each codec family, which converts a loaded tile to float [dim][TILE] in the coded frame. A new codec needs one more
   case and one more file. If `with_means` is 0, the vectors of key_mean are left out, because add_mean_scores adds their products to the
   scores. */

static void decode_tile(const Codec *codec, const Loaded *in, int with_means, float *spare, float *tile) {
    switch (codec->family) {
        case RAW: raw_decode(codec, in, tile); break;
        case GROUP: group_decode(codec, in, spare, tile); break;
        case SCALAR: scalar_decode(codec, in, tile); break;
        case OCTAHEDRAL: octahedral_decode(codec, in, tile); break;
        case ANGLE: angle_decode(codec, in, tile); break;
        case POLAR: polar_decode(codec, in, spare, tile); break;
        case MINIFLOAT: minifloat_decode(codec, in, tile); break;
        case KLT: klt_decode(codec, in, tile); break;
        case LOSSLESS: lossless_decode(codec, in, tile); break;
        case TRELLIS: trellis_decode(codec, in, tile); break;
        case QUATERNION: quaternion_decode(codec, in, spare, tile); break;
    }
    put_sidecars(codec, in, with_means, spare, tile);
}
