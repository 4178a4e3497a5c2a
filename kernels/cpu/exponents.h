/* Splits values of lossless into exponents and words of signs and fractions, and joins them (formats/lossless.py). */

/* Joins the values of one head's tokens, bit for bit. */
static void join_tokens(const Join *call, int64_t head, int64_t start, int64_t stop) {
    int64_t half = call->dim / 2, batch = head / call->heads, of_head = head % call->heads, heads = call->batch * call->heads;
    const char *plane = call->plane.data + batch * call->plane.batch + of_head * call->plane.head;
    char *out = (char *)call->out.data + batch * call->out.batch + of_head * call->out.head;
    for (int64_t token = start; token < stop; token++) {
        const uint8_t *exponents = call->exponents + (token / call->chunk * heads + head) * call->longest + token % call->chunk * call->dim;
        const uint16_t *words = (const uint16_t *)(plane + token * call->plane.row);
        uint16_t *values = (uint16_t *)(out + token * call->out.row);
        for (int64_t c = 0; c < half; c++) values[c] = (uint16_t)((words[c] & 0x80) << 8 | exponents[c] << 7 | (words[c] & 0x7f));
        for (int64_t c = 0; c < half; c++)
            values[half + c] = (uint16_t)((words[c] & 0x8000) | exponents[half + c] << 7 | (words[c] >> 8 & 0x7f));
    }
}

#if LEVEL >= 3
/* The exponents of 4 * LANES values, in order. */
INLINE vi exponents_of(const uint16_t *values) {
#if LEVEL == 4
    __m512i first = _mm512_loadu_si512(values), second = _mm512_loadu_si512(values + 32);
    first = _mm512_srli_epi16(_mm512_slli_epi16(first, 1), 8), second = _mm512_srli_epi16(_mm512_slli_epi16(second, 1), 8);
    return (vi)_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packus_epi16(first, second));
#else
    __m256i first = _mm256_loadu_si256((const __m256i *)values), second = _mm256_loadu_si256((const __m256i *)(values + 16));
    first = _mm256_srli_epi16(_mm256_slli_epi16(first, 1), 8), second = _mm256_srli_epi16(_mm256_slli_epi16(second, 1), 8);
    return (vi)_mm256_permute4x64_epi64(_mm256_packus_epi16(first, second), 0xd8);
#endif
}
#endif

/* Splits the values of one head's tokens. */
static void split_tokens(const Split *call, int64_t head, int64_t start, int64_t stop) {
    int64_t dim = call->dim, half = dim / 2, batch = head / call->heads, of_head = head % call->heads, heads = call->batch * call->heads;
    char *plane = (char *)call->plane.data + batch * call->plane.batch + of_head * call->plane.head;
    for (int64_t token = start; token < stop; token++) {
        uint8_t *exponents = call->exponents + (token / call->chunk * heads + head) * call->longest + token % call->chunk * dim;
        const uint16_t *values = (const uint16_t *)row_of(&call->x, batch, of_head, token);
        uint16_t *words = (uint16_t *)(plane + token * call->plane.row);
        int64_t c = 0;
#if LEVEL >= 3
        for (; c + 4 * LANES <= dim; c += 4 * LANES) store_int((int32_t *)(exponents + c), exponents_of(values + c));
#endif
        for (; c < dim; c++) exponents[c] = (uint8_t)(values[c] >> 7);
        for (c = 0; c + 2 * LANES <= half; c += 2 * LANES) {
            vu first = (vu)load_int((const int32_t *)(values + c)), second = (vu)load_int((const int32_t *)(values + half + c));
            first = (first >> 8 & 0x800080) | (first & 0x7f007f), second = (second & 0x80008000) | (second & 0x7f007f) << 8;
            store_int((int32_t *)(words + c), (vi)(first | second));
        }
        for (; c < half; c++) {
            uint16_t first = values[c], second = values[half + c];
            words[c] = (uint16_t)((first >> 8 & 0x80) | (first & 0x7f) | (second & 0x8000) | (second & 0x7f) << 8);
        }
    }
}

/* Neighboring values count in separate tables, because equal ones would wait for each other's store. */
enum { APART_COUNTS = 8, TOKENS_COUNTED = 1 << 16 };

static void count_row(const uint16_t *values, int64_t dim, uint32_t (*counts)[256]) {
    int64_t c = 0;
    for (; c + APART_COUNTS <= dim; c += APART_COUNTS)
        for (int i = 0; i < APART_COUNTS; i++) counts[i][values[c + i] >> 7 & 0xff]++;
    for (; c < dim; c++) counts[0][values[c] >> 7 & 0xff]++;
}

#if LEVEL >= 3
/* The usual exponents are the USUAL consecutive ones from one exponent on. Every byte lane counts each of them, up to 255 times. */
enum { USUAL = 16 };
typedef uint8_t vo __attribute__((vector_size(4 * LANES)));
typedef uint8_t vo_any __attribute__((vector_size(4 * LANES), aligned(1), may_alias));

/* Returns the first of the USUAL exponents that occur most often. */
static uint32_t usual_exponents(const uint32_t (*counts)[256]) {
    uint32_t sum = 0, most = 0, found = 0;
    for (uint32_t e = 0; e < 256; e++) {
        for (int i = 0; i < APART_COUNTS; i++) sum += counts[i][e] - (e < USUAL ? 0 : counts[i][e - USUAL]);
        if (e + 1 >= USUAL && sum > most) most = sum, found = e + 1 - USUAL;
    }
    return found;
}

/* Counts exponents in up to 255 vectors of rows. `dim` is a multiple of the vector size. */
static void count_usual(const char *row, int64_t stride, int64_t rows, int64_t dim, uint32_t usual, uint32_t *counts) {
    vo lanes[USUAL];
    for (int i = 0; i < USUAL; i++) lanes[i] = (vo){0};
    for (int64_t t = 0; t < rows; t++, row += stride)
        for (int64_t c = 0; c < dim; c += 4 * LANES) {
            vo own = (vo)exponents_of((const uint16_t *)row + c) - (uint8_t)usual;
#if LEVEL == 4
            uint64_t others = _mm512_cmpge_epu8_mask((__m512i)own, _mm512_set1_epi8(USUAL));
            UNROLLED for (int i = 0; i < USUAL; i++) {
                __mmask64 same = _mm512_cmpeq_epi8_mask((__m512i)own, _mm512_set1_epi8(i));
                lanes[i] = (vo)_mm512_mask_sub_epi8((__m512i)lanes[i], same, (__m512i)lanes[i], _mm512_set1_epi8(-1));
            }
#else
            uint64_t others = (uint32_t)~_mm256_movemask_epi8((__m256i)(own < USUAL));
            UNROLLED for (int i = 0; i < USUAL; i++) lanes[i] -= (vo)(own == (uint8_t)i);
#endif
            for (; others; others &= others - 1) counts[((const uint16_t *)row)[c + __builtin_ctzll(others)] >> 7 & 0xff]++;
        }
    for (int i = 0; i < USUAL; i++)
        for (int lane = 0; lane < 4 * LANES; lane++) counts[usual + i] += lanes[i][lane];
}
#endif

/* Counts the exponents of one head's values. */
static void count_exponents(const Split *call, int64_t head) {
    uint32_t counts[APART_COUNTS][256];
    int64_t *found = call->counts + 256 * head;
    memset(found, 0, 256 * sizeof *found);
    for (int64_t first = 0; first < call->tokens; first += TOKENS_COUNTED) {
        int64_t last = first + TOKENS_COUNTED < call->tokens ? first + TOKENS_COUNTED : call->tokens, token = first;
        const char *rows = row_of(&call->x, head / call->heads, head % call->heads, 0);
        memset(counts, 0, sizeof counts);
        count_row((const uint16_t *)(rows + call->x.row * token++), call->dim, counts);
#if LEVEL >= 3
        int64_t together = call->dim % (4 * LANES) ? 0 : 255 * 4 * LANES / call->dim;
        uint32_t usual = usual_exponents((const uint32_t(*)[256])counts);
        for (int64_t count; together && token < last; token += count) {
            count = last - token < together ? last - token : together;
            count_usual(rows + call->x.row * token, call->x.row, count, call->dim, usual, counts[0]);
        }
#endif
        for (; token < last; token++) count_row((const uint16_t *)(rows + call->x.row * token), call->dim, counts);
        for (int i = 0; i < APART_COUNTS; i++)
            for (int s = 0; s < 256; s++) found[s] += counts[i][s];
    }
}
