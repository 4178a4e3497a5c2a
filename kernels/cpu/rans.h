/* Chunks of rANS (spec/rans.md, formats/rans.py): 32 lanes that share one sequence of words, decoded together. */

enum { RANS_LANES = 32, RANS_BITS = 12, RANS_SLOTS = 1 << RANS_BITS, RANS_LEAST = 1 << 16 };

/* The state of decoding a chunk of `length` symbols: an array of words, the next word, and the slots of one table or, with `tables`, of a
   separate table for each symbol. */
typedef struct {
    const uint16_t *words;
    int64_t count, at;
    const uint32_t *slots;
    const uint8_t *tables;
    uint32_t states[RANS_LANES];
    int64_t length;
    uint8_t *symbols;
    const char *next; /* what the caller will read next, of as many bytes as symbols */
} RansRun;

/* Decodes symbol `i` of one lane. Words after the end of the array are read as 0. */
INLINE void rans_symbol(RansRun *run, int64_t i) {
    uint32_t x = run->states[i % RANS_LANES], slot = x & (RANS_SLOTS - 1);
    uint32_t found = run->slots[(run->tables ? run->tables[i] * RANS_SLOTS : 0) + slot];
    x = ((found >> 8 & (RANS_SLOTS - 1)) + 1) * (x >> RANS_BITS) + slot - (found >> 20);
    if (x < RANS_LEAST) {
        x = x << 16 | (run->at < run->count ? run->words[run->at] : 0);
        ++run->at;
    }
    run->states[i % RANS_LANES] = x;
    run->symbols[i] = (uint8_t)found;
}

/* How a step looks up slots: in one table, or in the tables of its symbols. */
enum { ONE_TABLE, OF_SYMBOLS };

#if LEVEL == 4
/* Lanes whose states are too small take one word each, in lane order. This loads 16 words even if fewer are needed. They are inside the
   array, but may belong to another chunk. */
INLINE vu refilled(const RansRun *run, vu x, int64_t *at) {
    __mmask16 low = _mm512_cmplt_epu32_mask((__m512i)x, _mm512_set1_epi32(RANS_LEAST));
    __m512i next = _mm512_maskz_expand_epi32(low, (__m512i)load_words(run->words + *at));
    *at += __builtin_popcount(low);
    return (vu)_mm512_mask_or_epi32((__m512i)x, low, (__m512i)(x << 16), next);
}

/* Decodes one symbol per lane, beginning with symbol `i`. */
INLINE void rans_step(const RansRun *run, int64_t i, int kind, vu *state, int64_t *at) {
    UNROLLED for (int part = 0; part < 2; part++) {
        vu x = state[part], slot = x & (RANS_SLOTS - 1), place = slot;
        if (kind == OF_SYMBOLS) place |= (vu)load_octets(run->tables + i + 16 * part) << RANS_BITS;
        vu found = (vu)_mm512_i32gather_epi32((__m512i)place, run->slots, 4);
        x = ((found >> 8 & (RANS_SLOTS - 1)) + 1) * (x >> RANS_BITS) + slot - (found >> 20);
        state[part] = refilled(run, x, at);
        _mm_storeu_si128((__m128i *)(run->symbols + i + 16 * part), _mm512_cvtepi32_epi8((__m512i)found));
    }
}
#elif LEVEL == 3
/* For each mask of 8 lanes, the index of the word that each lane takes among the next words. */
#define PLACE(mask, lane) __builtin_popcount((mask) & ((1 << (lane)) - 1))
#define PLACES(mask) \
    {PLACE(mask, 0), PLACE(mask, 1), PLACE(mask, 2), PLACE(mask, 3), PLACE(mask, 4), PLACE(mask, 5), PLACE(mask, 6), PLACE(mask, 7)}
#define PLACES_4(mask) PLACES(mask), PLACES(mask + 1), PLACES(mask + 2), PLACES(mask + 3)
#define PLACES_16(mask) PLACES_4(mask), PLACES_4(mask + 4), PLACES_4(mask + 8), PLACES_4(mask + 12)
#define PLACES_64(mask) PLACES_16(mask), PLACES_16(mask + 16), PLACES_16(mask + 32), PLACES_16(mask + 48)
static const uint8_t rans_places[256][8] = {PLACES_64(0), PLACES_64(64), PLACES_64(128), PLACES_64(192)};

/* Decodes symbols from `i`, one per lane. Loads 8 words even if fewer are needed: all are in the array, if not in the chunk. */
INLINE void rans_step(const RansRun *run, int64_t i, int kind, vu *state, int64_t *at) {
    const __m256i bytes = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                           0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    UNROLLED for (int part = 0; part < 4; part++) {
        uint8_t *symbols = run->symbols + i + 8 * part;
        __m256i x = (__m256i)state[part], slot = _mm256_and_si256(x, _mm256_set1_epi32(RANS_SLOTS - 1));
        __m256i place = slot;
        if (kind == OF_SYMBOLS) {
            __m256i own = (__m256i)load_octets(run->tables + i + 8 * part);
            place = _mm256_or_si256(slot, _mm256_slli_epi32(own, RANS_BITS));
        }
        __m256i found = _mm256_i32gather_epi32((const int *)run->slots, place, 4);
        __m256i frequency = _mm256_and_si256(_mm256_srli_epi32(found, 8), _mm256_set1_epi32(RANS_SLOTS - 1));
        x = _mm256_mullo_epi32(_mm256_add_epi32(frequency, _mm256_set1_epi32(1)), _mm256_srli_epi32(x, RANS_BITS));
        x = _mm256_add_epi32(x, _mm256_sub_epi32(slot, _mm256_srli_epi32(found, 20)));
        __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(x, 16), _mm256_setzero_si256());
        int mask = _mm256_movemask_ps(_mm256_castsi256_ps(low));
        __m256i next = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(run->words + *at)));
        next = _mm256_permutevar8x32_epi32(next, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)rans_places[mask])));
        state[part] = (vu)_mm256_blendv_epi8(x, _mm256_or_si256(_mm256_slli_epi32(x, 16), next), low);
        *at += __builtin_popcount(mask);
        __m256i packed = _mm256_shuffle_epi8(found, bytes);
        uint32_t first = (uint32_t)_mm256_extract_epi32(packed, 0), second = (uint32_t)_mm256_extract_epi32(packed, 4);
        memcpy(symbols, &first, 4);
        memcpy(symbols + 4, &second, 4);
    }
}
#endif

#if LEVEL >= 3
/* Decodes the whole steps that all `count` chunks have, from symbol `i` on, while words remain. Returns the first symbol that was not
   decoded. */
INLINE int64_t rans_steps(RansRun *runs, int count, int kind, int64_t i) {
    vu state[MAX_CHUNKS][RANS_LANES / LANES];
    int64_t at[MAX_CHUNKS], length = INT64_MAX;
    for (int r = 0; r < count; r++) {
        memcpy(state[r], runs[r].states, sizeof state[r]);
        at[r] = runs[r].at;
        length = runs[r].length < length ? runs[r].length : length;
    }
    for (; i + RANS_LANES <= length; i += RANS_LANES) {
        int enough = 1;
        UNROLLED for (int r = 0; r < count; r++) enough &= at[r] + RANS_LANES <= runs[r].count;
        if (!enough) break;
        UNROLLED for (int r = 0; r < count; r++) rans_step(&runs[r], i, kind, state[r], &at[r]);
    }
    for (int r = 0; r < count; r++) {
        memcpy(runs[r].states, state[r], sizeof state[r]);
        runs[r].at = at[r];
    }
    return i;
}
#endif

#if LEVEL == 4
#ifndef __clang__
/* With VBMI2, few symbols are looked up in registers. */
#define WITH_VBMI2 __attribute__((target("avx512vbmi2")))

/* A table of few symbols, as a binary tree. Node n contains the last slot before those of its right child 2n + 1. Slots up to it belong to
   the left child 2n. Leaf FEW + i is the i-th symbol that has slots, with its first slot and its frequency. */
enum { FEW = 64, FEW_BITS = 6 };
typedef struct {
    uint16_t node[FEW], first[FEW], frequency[FEW], symbol[FEW];
} FewSymbols;

/* Returns 0 if there are more symbols, or if a run of slots does not start where its slots state. */
static int few_symbols(const uint32_t *slots, FewSymbols *few) {
    uint32_t at = 0;
    for (int i = 0; i < FEW; i++) {
        few->first[i] = (uint16_t)at;
        few->frequency[i] = few->symbol[i] = 0;
        if (at >= RANS_SLOTS) continue;
        if (slots[at] >> 20 != at) return 0;
        few->frequency[i] = (uint16_t)((slots[at] >> 8 & (RANS_SLOTS - 1)) + 1);
        few->symbol[i] = slots[at] & 255;
        at += few->frequency[i];
    }
    few->node[0] = 0;
    for (uint32_t width = FEW, n = 1; width > 1; width /= 2)
        for (uint32_t middle = width / 2; middle < FEW; middle += width) few->node[n++] = few->first[middle] - 1;
    return at == RANS_SLOTS;
}

/* The 32 states of a chunk, whose upper and lower halves are in separate vectors. */
typedef struct {
    __m512i high, low;
} SplitStates;

INLINE __m512i of_few(const uint16_t *table, __m512i index) {
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(table), index, _mm512_loadu_si512(table + 32));
}

/* Decodes one symbol per lane, from symbol `i` on. Six bisection steps take less time than two gathers. */
WITH_VBMI2 INLINE void rans_step_of_few(const RansRun *run, int64_t i, const FewSymbols *few, SplitStates *state, int64_t *at) {
    const __m512i node[2] = {_mm512_loadu_si512(few->node), _mm512_loadu_si512(few->node + 32)};
    __m512i slot = _mm512_and_si512(state->low, _mm512_set1_epi16(RANS_SLOTS - 1)), n = _mm512_set1_epi16(1);
    /* The sign of the difference tells if the slot belongs to the right child. */
    n = _mm512_shldi_epi16(n, _mm512_sub_epi16(_mm512_set1_epi16((int16_t)few->node[1]), slot), 1);
    UNROLLED for (int level = 1; level < FEW_BITS; level++)
        n = _mm512_shldi_epi16(n, _mm512_sub_epi16(_mm512_permutexvar_epi16(n, node[level == FEW_BITS - 1]), slot), 1);
    __m512i frequency = of_few(few->frequency, n), rest = _mm512_sub_epi16(slot, of_few(few->first, n));
    /* The product of the frequency and the upper 20 bits of the state, in parts of 16 bits. */
    __m512i middle = _mm512_shldi_epi16(state->high, state->low, 16 - RANS_BITS), top = _mm512_srli_epi16(state->high, RANS_BITS);
    __m512i low = _mm512_add_epi16(_mm512_mullo_epi16(frequency, middle), rest);
    __m512i high = _mm512_add_epi16(_mm512_mulhi_epu16(frequency, middle), _mm512_mullo_epi16(frequency, top));
    high = _mm512_mask_sub_epi16(high, _mm512_cmplt_epu16_mask(low, rest), high, _mm512_set1_epi16(-1));
    /* Lanes whose states are too small take one word each, in lane order. This loads 32 words even if fewer are needed. They are inside the
       array, but may belong to another chunk. */
    __mmask32 small = _mm512_testn_epi16_mask(high, high);
    state->high = _mm512_mask_mov_epi16(high, small, low);
    state->low = _mm512_mask_expand_epi16(low, small, _mm512_loadu_si512(run->words + *at));
    *at += __builtin_popcount(small);
    __builtin_prefetch(run->next + i, 0, 2);
    _mm256_storeu_si256((__m256i *)(run->symbols + i), _mm512_cvtepi16_epi8(of_few(few->symbol, n)));
}

/* Decodes the whole steps that MAX_CHUNKS chunks have, while words remain. Returns the first symbol that was not decoded. */
WITH_VBMI2 static int64_t rans_steps_of_few(RansRun *runs, const FewSymbols *few) {
    SplitStates state[MAX_CHUNKS];
    int64_t at[MAX_CHUNKS], length = INT64_MAX, i = 0;
    for (int r = 0; r < MAX_CHUNKS; r++) {
        __m512i first = _mm512_loadu_si512(runs[r].states), second = _mm512_loadu_si512(runs[r].states + 16);
        state[r].low = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(first)), _mm512_cvtepi32_epi16(second), 1);
        first = _mm512_srli_epi32(first, 16), second = _mm512_srli_epi32(second, 16);
        state[r].high = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(first)), _mm512_cvtepi32_epi16(second), 1);
        at[r] = runs[r].at;
        length = runs[r].length < length ? runs[r].length : length;
    }
    for (; i + RANS_LANES <= length; i += RANS_LANES) {
        int enough = 1;
        UNROLLED for (int r = 0; r < MAX_CHUNKS; r++) enough &= at[r] + RANS_LANES <= runs[r].count;
        if (!enough) break;
        UNROLLED for (int r = 0; r < MAX_CHUNKS; r++) rans_step_of_few(&runs[r], i, &few[r], &state[r], &at[r]);
    }
    for (int r = 0; r < MAX_CHUNKS; r++) {
        uint16_t high[RANS_LANES], low[RANS_LANES];
        _mm512_storeu_si512(high, state[r].high), _mm512_storeu_si512(low, state[r].low);
        ROLLED for (int lane = 0; lane < RANS_LANES; lane++) runs[r].states[lane] = (uint32_t)high[lane] << 16 | low[lane];
        runs[r].at = at[r];
    }
    return i;
}
#endif

/* Decodes steps of MAX_CHUNKS chunks as rans_steps does. */
static int64_t rans_steps_of_all(RansRun *runs) {
#ifndef __clang__
    FewSymbols few[MAX_CHUNKS];
    int fit = __builtin_cpu_supports("avx512vbmi2");
    for (int r = 0; r < MAX_CHUNKS && fit; r++)
        if (r && runs[r].slots == runs[0].slots)
            few[r] = few[0];
        else
            fit = few_symbols(runs[r].slots, &few[r]);
    if (fit) return rans_steps_of_few(runs, few);
#endif
    return rans_steps(runs, MAX_CHUNKS, ONE_TABLE, 0);
}
#endif

/* Decodes all symbols of the chunks. Each step depends on the one before, so the steps of as many chunks as fit in registers are
   interleaved. */
static void rans_decode(RansRun *runs, int count) {
    while (count > 0) {
        int64_t i = 0;
        int together = 1;
#if LEVEL >= 3
        if (runs->tables) {
            i = rans_steps(runs, 1, OF_SYMBOLS, i);
#if LEVEL == 4
        } else if (count >= MAX_CHUNKS) {
            together = MAX_CHUNKS;
            i = rans_steps_of_all(runs);
#endif
        } else if (count >= 2) {
            together = 2;
            i = rans_steps(runs, 2, ONE_TABLE, i);
        }
#endif
        for (RansRun *run = runs; run < runs + together; run++) {
            int64_t left = i;
#if LEVEL >= 3
            if (!run->tables) left = rans_steps(run, 1, ONE_TABLE, left);
#endif
            for (; left < run->length; left++) rans_symbol(run, left);
        }
        runs += together;
        count -= together;
    }
}

/* Decodes `count` chunks, beginning with chunk `first`. */
static void rans_chunks(const Rans *call, int64_t first, int count) {
    RansRun runs[MAX_CHUNKS];
    for (int r = 0; r < count; r++) {
        int64_t chunk = first + r;
        const uint8_t *tables = call->tables ? call->tables + chunk * call->stride : NULL;
        runs[r] = (RansRun){call->words, call->word_count, call->first_word[chunk], .tables = tables, .length = call->lengths[chunk]};
        runs[r].slots = tables ? call->slots : call->slots + call->table[chunk] * RANS_SLOTS;
        runs[r].symbols = call->symbols + chunk * call->stride;
        runs[r].next = (const char *)runs[r].symbols;
        memcpy(runs[r].states, call->states + chunk * RANS_LANES, sizeof runs[r].states);
    }
    rans_decode(runs, count);
    for (int r = 0; r < count; r++) {
        call->read[first + r] = runs[r].at - call->first_word[first + r];
        memcpy(call->last + (first + r) * RANS_LANES, runs[r].states, sizeof runs[r].states);
    }
}

/* The state of encoding a chunk, from its last symbol to its first. The words written so far begin at `to`. */
typedef struct {
    const uint8_t *symbols, *tables;
    const RansStep *steps;
    uint16_t *to;
    uint32_t states[RANS_LANES];
} RansCoder;

/* Encodes symbols [first, last), starting with the last one. Lanes of a step are also encoded in reverse, so that words are in lane order.
   A word is always written, and overwritten by the next one if it was not needed, so that no branch depends on a symbol. */
static void rans_encode_symbols(RansCoder *coder, int64_t first, int64_t last) {
    for (int64_t i = last - 1; i >= first; i--) {
        RansStep step = coder->steps[(coder->tables ? coder->tables[i] * 256 : 0) + coder->symbols[i]];
        uint32_t x = coder->states[i % RANS_LANES], taken = x >> (32 - RANS_BITS) >= step.frequency;
        coder->to[-1] = (uint16_t)x;
        coder->to -= taken;
        x >>= 16 * taken;
        uint32_t quotient = (uint32_t)((unsigned __int128)step.reciprocal * x >> 64);
        coder->states[i % RANS_LANES] = x + step.bias + quotient * (RANS_SLOTS - step.frequency);
    }
}

#if LEVEL == 4
enum { FREQUENCY_BITS = RANS_BITS + 1, MOST_USED = 32 };

/* The frequencies of all symbols, with their first slots in the upper bits. The frequencies of the MOST_USED symbols from `least` on, which
   include nearly all values, are looked up in registers, together with reciprocals that are slightly too small. */
typedef struct {
    uint32_t slots[256], used[MOST_USED], least;
    float reciprocals[MOST_USED];
} RansSymbols;

static const float BELOW_ONE = 1 - 0x1p-22f;

static void find_most_used(const RansStep *steps, RansSymbols *found) {
    uint32_t sum = 0, most = 0;
    for (uint32_t s = 0; s < 256; s++) {
        uint32_t frequency = steps[s].frequency, first = steps[s].bias - (frequency == 1 ? RANS_SLOTS - 1 : 0);
        found->slots[s] = frequency | first << FREQUENCY_BITS;
        sum += frequency - (s < MOST_USED ? 0 : steps[s - MOST_USED].frequency);
        if (s + 1 < MOST_USED || sum <= most) continue;
        most = sum;
        found->least = s + 1 - MOST_USED;
    }
    for (int i = 0; i < MOST_USED; i++) {
        found->used[i] = found->slots[found->least + i];
        found->reciprocals[i] = (float)((1 - 0x1p-22) / steps[found->least + i].frequency);
    }
}

/* Encodes a symbol per lane of 16 lanes. */
INLINE void rans_encode_step(const RansSymbols *table, const uint8_t *symbols, vu *state, uint16_t **to) {
    vu x = *state, symbol = (vu)load_octets(symbols), place = symbol - table->least;
    const uint32_t *used = table->used;
    const float *reciprocals = table->reciprocals;
    vu own = (vu)_mm512_permutex2var_epi32(_mm512_loadu_si512(used), (__m512i)place, _mm512_loadu_si512(used + 16));
    vf reciprocal = (vf)_mm512_permutex2var_ps(_mm512_loadu_ps(reciprocals), (__m512i)place, _mm512_loadu_ps(reciprocals + 16));
    __mmask16 others = _mm512_cmpge_epu32_mask((__m512i)place, _mm512_set1_epi32(MOST_USED));
    if (__builtin_expect(others, 0)) {
        own = (vu)_mm512_mask_i32gather_epi32((__m512i)own, others, (__m512i)symbol, table->slots, 4);
        reciprocal = BELOW_ONE / to_float((vi)own & ((1 << FREQUENCY_BITS) - 1));
    }
    vu frequency = own & ((1 << FREQUENCY_BITS) - 1);
    __mmask16 full = _mm512_cmpge_epu32_mask((__m512i)(x >> (32 - RANS_BITS)), (__m512i)frequency);
    int count = __builtin_popcount(full);
    *to -= count;
    _mm256_mask_storeu_epi16(*to, (__mmask16)((1u << count) - 1), _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, (__m512i)x)));
    x = (vu)_mm512_mask_srli_epi32((__m512i)x, full, (__m512i)x, 16);
    /* The quotient is below 2^20, so it is right or one too small. */
    vu quotient = (vu)_mm512_cvttps_epu32((__m512)((vf)_mm512_cvtepu32_ps((__m512i)x) * reciprocal)), rest = x - quotient * frequency;
    __mmask16 under = _mm512_cmpge_epu32_mask((__m512i)rest, (__m512i)frequency);
    x = (quotient << RANS_BITS) + rest + (own >> FREQUENCY_BITS);
    *state = (vu)_mm512_mask_add_epi32((__m512i)x, under, (__m512i)x, (__m512i)(RANS_SLOTS - frequency));
}

/* Encodes whole steps of symbols [first, last) of `count` chunks. Each step depends on the one before, so the chunks are interleaved. */
INLINE void rans_encode_steps(RansCoder *coders, const RansSymbols *tables, int count, int64_t first, int64_t last) {
    vu state[RANS_TOGETHER][2];
    uint16_t *to[RANS_TOGETHER];
    for (int r = 0; r < count; r++) {
        memcpy(state[r], coders[r].states, sizeof state[r]);
        to[r] = coders[r].to;
    }
    for (int64_t i = last - RANS_LANES; i >= first; i -= RANS_LANES)
        UNROLLED for (int half = 1; half >= 0; half--)
            UNROLLED for (int r = 0; r < count; r++) rans_encode_step(&tables[r], coders[r].symbols + i + 16 * half, &state[r][half], &to[r]);
    for (int r = 0; r < count; r++) {
        memcpy(coders[r].states, state[r], sizeof state[r]);
        coders[r].to = to[r];
    }
}
#endif

/* Encodes `count` chunks, up to RANS_TOGETHER. */
static void rans_encode_chunks(const RansEncode *call, int64_t first, int count) {
    RansCoder coders[RANS_TOGETHER];
    int64_t whole[RANS_TOGETHER], least = INT64_MAX;
    for (int r = 0; r < count; r++) {
        int64_t chunk = first + r;
        const uint8_t *tables = call->tables ? call->tables + chunk * call->stride : NULL;
        coders[r] = (RansCoder){call->symbols + chunk * call->stride, tables, tables ? call->steps : call->steps + call->table[chunk] * 256,
                                call->words + (chunk + 1) * call->stride, {0}};
        for (int i = 0; i < RANS_LANES; i++) coders[r].states[i] = RANS_LEAST;
        whole[r] = LEVEL == 4 && !tables ? call->lengths[chunk] / RANS_LANES * RANS_LANES : 0;
        least = whole[r] < least ? whole[r] : least;
        rans_encode_symbols(&coders[r], whole[r], call->lengths[chunk]);
    }
#if LEVEL == 4
    RansSymbols tables[RANS_TOGETHER];
    for (int r = 0; r < count && !call->tables; r++) {
        find_most_used(coders[r].steps, &tables[r]);
        rans_encode_steps(&coders[r], &tables[r], 1, count == RANS_TOGETHER ? least : 0, whole[r]);
    }
    if (count == RANS_TOGETHER && !call->tables) rans_encode_steps(coders, tables, RANS_TOGETHER, 0, least);
#endif
    for (int r = 0; r < count; r++) {
        call->written[first + r] = call->words + (first + r + 1) * call->stride - coders[r].to;
        memcpy(call->states + (first + r) * RANS_LANES, coders[r].states, sizeof coders[r].states);
    }
}
