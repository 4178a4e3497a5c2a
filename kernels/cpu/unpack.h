/* One item of unpacking: tokens of one head, decoded tile by tile, rotated back and written row by row. */

static void scale_channels(const float *scales, int64_t dim, float *tile) {
    for (int64_t d = 0; d < dim; d++)
        for (int t = 0; t < TILE; t += LANES) store(tile + d * TILE + t, load(tile + d * TILE + t) * scales[d]);
}

/* Unpacks tokens [start, stop) of one head. */
static void unpack_item(const Unpack *call, int64_t batch, int64_t head, int64_t start, int64_t stop, Loaded *in, float *tile, float *spare) {
    const Codec *codec = call->side.codec;
    const char *scales = call->channel_scales.data;
    char *to = (char *)call->out.data + batch * call->out.batch + head * call->out.head + (start - call->start) * call->out.row;
    Rows rows = {to, call->out.row, call->dtype, call->past_caches};
    int64_t segment = find_segment(&call->side, start);
    int as_rows = has_group_rows(call);
    in->batch = batch;
    in->head = head;
    for (; start < stop; start += TILE, rows.to += TILE * rows.stride) {
        int64_t count = stop - start < TILE ? stop - start : TILE;
        find_pieces(&call->side, start, count, &segment, in);
        load_tile(codec, !as_rows, in);
        if (as_rows) {
            write_group_rows(codec, batch, head, in, spare, &rows);
            continue;
        }
        decode_tile(codec, in, 1, spare, tile);
        if (codec->family == KLT) klt_original(codec, in, tile, spare);
        rotate_back(&call->rotation, codec->dim, tile, spare);
        if (scales) scale_channels((const float *)(scales + batch * call->channel_scales.batch + head * call->channel_scales.head), codec->dim, tile);
        write_rows(tile, codec->dim, count, spare, &rows);
    }
    finish_copies();
}
