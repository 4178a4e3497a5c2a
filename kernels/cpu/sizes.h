/* Computes sizes of tokens from stored data, and finds out if one is far above the typical size (formats/token_norms.py, has_large_size). */

/* One member of each of LANES tokens: numbers, halves in the low words of pairs, and the largest of 2 or 4 bytes, which are exponents. */
INLINE vf sizes_at(const char *data, int64_t kind, int64_t members) {
    if (kind == SIZE_FLOATS) return load((const float *)data);
    if (kind == SIZE_PAIRS) return from_half(load_int((const int32_t *)data) & 0xffff);
    vi word = members == 2 ? load_words((const uint16_t *)data) : load_int((const int32_t *)data);
    vi largest = word & 255;
    for (int32_t shift = 8; shift < 8 * members; shift += 8) {
        vi other = (vi)((vu)word >> (uint32_t)shift) & 255;
        largest = choose_int(other > largest, other, largest);
    }
    return (vf)(largest << 23);
}

/* Returns the size of the token whose `members` begin at `data`: the root of the sum of squares for binary16 numbers, or the largest power
   of two. */
static float size_at(const char *data, int64_t kind, int64_t members) {
    float sum = 0;
    int32_t largest = 0;
    for (int64_t m = 0; m < members; m++) {
        if (kind == SIZE_PAIRS) {
            float scale = half(word_at(data + 4 * m));
            sum += scale * scale;
        } else {
            int32_t code = ((const uint8_t *)data)[m];
            largest = code > largest ? code : largest;
        }
    }
    if (kind == SIZE_PAIRS) return sqrtf(sum);
    largest <<= 23;
    memcpy(&sum, &largest, 4);
    return sum;
}

/* Computes `count` sizes, followed by NaN up to a whole vector. */
INLINE void read_sizes(const char *data, int64_t kind, int64_t members, int64_t count, float *sizes) {
    int64_t bytes = members * (kind == SIZE_POWERS ? 1 : 4), t = 0;
    if (bytes == 4 || (kind == SIZE_POWERS && members == 2)) {
        for (; t + LANES <= count; t += LANES) store(sizes + t, sizes_at(data + t * bytes, kind, members));
        if (t < count) {
            char rest[4 * LANES] = {0};
            memcpy(rest, data + t * bytes, (count - t) * bytes);
            store(sizes + t, sizes_at(rest, kind, members));
        }
    } else
        for (; t < count; t++) sizes[t] = size_at(data + t * bytes, kind, members);
    for (t = count; t % LANES; t++) sizes[t] = NAN;
}

/* Returns 1 if one of the sizes [first, count) exceeds `ratio` times more than half of the others. This does not need the median. */
INLINE int page_has_large(const float *sizes, int64_t first, int64_t count, float ratio) {
    vf most = splat(-INFINITY), least = splat(INFINITY);
    for (int64_t t = 0; t < count; t += LANES) {
        most = larger(load(sizes + t), most);
        least = smaller(load(sizes + t), least);
    }
    float largest = largest_of(most), smallest = -largest_of(-least);
    if (!(smallest * ratio < largest)) return 0;
    if (first) {
        largest = -INFINITY;
        for (int64_t t = first; t < count; t++) largest = sizes[t] > largest ? sizes[t] : largest;
    }
    int64_t below = 0, numbers = 0;
    for (int64_t t = 0; t < count; t++) below += sizes[t] * ratio < largest, numbers += sizes[t] == sizes[t];
    return numbers && below > (numbers - 1) / 2;
}

INLINE int64_t sizes_have_large(const Sizes *call, int64_t kind) {
    int64_t bytes = call->members * (kind == SIZE_POWERS ? 1 : 4);
    float sizes[MAX_SIZES + LANES];
    for (int64_t layer = 0; layer < call->layers; layer++)
        for (int64_t row = 0; row < call->rows; row++) {
            const char *data = call->data + layer * call->stride + row * call->tokens * bytes;
            for (int64_t first = 0; first < call->tokens; first += call->page) {
                int64_t stop = first + call->page, begin = first;
                if (stop > call->tokens) stop = call->tokens, begin = stop > call->page ? stop - call->page : 0;
                read_sizes(data + begin * bytes, kind, call->members, stop - begin, sizes);
                if (page_has_large(sizes, first - begin, stop - begin, call->ratio)) return 1;
            }
        }
    return 0;
}

AS_WRITTEN static int64_t have_large(const Sizes *call) {
    switch (call->kind) {
        case SIZE_FLOATS: return sizes_have_large(call, SIZE_FLOATS);
        case SIZE_PAIRS: return sizes_have_large(call, SIZE_PAIRS);
        default: return sizes_have_large(call, SIZE_POWERS);
    }
}
