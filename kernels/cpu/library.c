/* The functions that Python calls: they choose the instruction set, divide a call into items, and merge the results. */
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "interface.h"
#include "level.h"
#include "threads.h"

/* A call is divided into items for at least this many threads. Items do not depend on the actual number of threads, so results do not
   depend on it either. */
enum { MIN_ITEMS = 128, MIN_TOKENS = 4096 };

#if defined(__x86_64__)
/* Detects F16C, which Clang's __builtin_cpu_supports does not know. The result is cached, because cpuid takes microseconds in a virtual
   machine. */
static int converts_halves(void) {
    enum { UNKNOWN, NO, YES };
    static atomic_int known;
    unsigned a, b, c, d;
    int found = atomic_load_explicit(&known, memory_order_relaxed);
    if (found == UNKNOWN) {
        found = __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C ? YES : NO;
        atomic_store_explicit(&known, found, memory_order_relaxed);
    }
    return found == YES;
}
#endif

static const Level *level_of(int64_t number) {
#if defined(__x86_64__)
    static const Level *const levels[] = {&kvpack_v4, &kvpack_v3, &kvpack_portable};
    __builtin_cpu_init();
    int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
             converts_halves();
    int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd");
    number += v4 ? 0 : v3 ? 1 : 2;
    return number < 0 || number > 2 ? 0 : levels[number];
#else
    return number ? 0 : &kvpack_portable;
#endif
}

EXPORTED int64_t kvpack_interface(void) { return KVPACK_INTERFACE; }

EXPORTED const char *kvpack_level_name(int64_t level) {
    const Level *found = level < 0 ? 0 : level_of(level);
    return found ? found->name : 0;
}

EXPORTED int64_t kvpack_sizes(int64_t structure) {
    static const size_t sizes[] = {sizeof(Codec), sizeof(Span),       sizeof(Attend), sizeof(Unpack), sizeof(Encode),   sizeof(Rans),
                                   sizeof(Join),  sizeof(RansEncode), sizeof(Split),  sizeof(Read),   sizeof(RawSlots), sizeof(Sizes)};
    return structure >= 0 && structure < (int64_t)(sizeof sizes / sizeof *sizes) ? (int64_t)sizes[structure] : 0;
}

/* A call of any kind, for the functions of its items: most divide its tokens into `parts`. */
typedef struct {
    const void *call;
    const Level *level;
    int64_t parts;
    atomic_int *refused;
} Job;

static int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

static int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* All items of a call, and the part of the softmax that each item computes. */
typedef struct {
    const Attend *call;
    const Level *level;
    int64_t row_blocks, items;
    Item *item;
    float *largest, *total, *sums;
} Work;

static void attend_item(const void *context, int64_t number, char *memory) {
    const Work *work = context;
    work->level->attend(work->call, &work->item[number], memory, work->largest + number * ROW_SPACE, work->total + number * ROW_SPACE,
                        work->sums + number * ROW_SPACE * work->call->v_dim);
}

/* The number of tokens per item, a multiple of MIN_TOKENS. */
static int64_t tokens_at_once(const Span *span, int64_t others) {
    int64_t parts = ceiling(MIN_ITEMS, others > 0 ? others : 1), tokens = ceiling(span->stop - span->start, parts);
    return ceiling(tokens, MIN_TOKENS) * MIN_TOKENS;
}

/* Merges the parts of one block of rows of one head: the sums of each span are divided by the total weight of all spans. */
static void merge_block(const void *context, int64_t number, char *memory) {
    const Work *work = context;
    const Attend *call = work->call;
    int64_t block = number % work->row_blocks, head = number / work->row_blocks % call->heads, of_span = work->row_blocks * call->heads * call->batch;
    int64_t batch = number / work->row_blocks / call->heads, first = block * MAX_ROWS;
    int64_t rows = call->rows - first < MAX_ROWS ? call->rows - first : MAX_ROWS;
    (void)memory;
    for (int64_t r = 0; r < rows; r++) {
        float sink = call->sink_logits ? call->sink_logits[head * (call->rows / call->q_len) + (first + r) / call->q_len] : -INFINITY;
        float most = sink, total = 0;
        for (int64_t i = number; i < work->items; i += of_span)
            if (work->largest[i * ROW_SPACE + r] > most) most = work->largest[i * ROW_SPACE + r];
        float shift = most == -INFINITY ? 0 : most;
        for (int64_t i = number; i < work->items; i += of_span) {
            float *weight = &work->largest[i * ROW_SPACE + r];
            *weight = expf(*weight - shift);
            total += *weight * work->total[i * ROW_SPACE + r];
        }
        total += expf(sink - shift);
        float per_total = total > 0 || total != total ? 1 / total : 1;
        for (int64_t i = number; i < work->items; i += of_span) {
            const Span *span = work->item[i].span;
            float weight = work->largest[i * ROW_SPACE + r] * per_total;
            float *out = span->sums + ((batch * call->heads + head) * call->rows + first + r) * call->v_dim;
            const float *part = work->sums + (i * ROW_SPACE + r) * call->v_dim;
            for (int64_t d = 0; d < call->v_dim; d++) out[d] += weight * part[d];
        }
    }
}

/* Parts are ordered by span and token, and within these by batch, head and block of rows: the order of merge_block. */
static void list_items(Work *work) {
    const Attend *call = work->call;
    int64_t of_span = call->batch * call->heads * work->row_blocks, count = 0;
    for (int64_t s = 0; s < call->span_count; s++) {
        const Span *span = &call->spans[s];
        int64_t at_once = tokens_at_once(span, of_span);
        for (int64_t start = span->start; start < span->stop; start += at_once)
            for (int64_t number = 0; number < of_span; number++) {
                int64_t first = number % work->row_blocks * MAX_ROWS, left = call->rows - first;
                if (work->item)
                    work->item[count] = (Item){span, number / work->row_blocks / call->heads, number / work->row_blocks % call->heads, first,
                                               left < MAX_ROWS ? left : MAX_ROWS, start,
                                               start + at_once < span->stop ? start + at_once : span->stop};
                count++;
            }
    }
    work->items = count;
}

EXPORTED int64_t kvpack_attend(const Attend *call) {
    Work work = {call, level_of(call->level), ceiling(call->rows, MAX_ROWS), 0, 0, 0, 0, 0};
    list_items(&work);
    if (!work.items) return 0;
    work.item = malloc(sizeof(Item) * work.items);
    work.largest = malloc(sizeof(float) * work.items * ROW_SPACE * (2 + call->v_dim));
    int failed = !work.item || !work.largest;
    if (!failed) {
        work.total = work.largest + work.items * ROW_SPACE;
        work.sums = work.total + work.items * ROW_SPACE;
        list_items(&work);
        failed = kvpack_for_each(attend_item, &work, work.items, call->threads, work.level->attend_bytes(call));
    }
    int64_t blocks = call->batch * call->heads * work.row_blocks;
    if (!failed) failed = kvpack_for_each(merge_block, &work, blocks, call->rows > MAX_ROWS ? call->threads : 1, 1);
    free(work.item);
    free(work.largest);
    return failed;
}

/* Number of tokens per item of unpacking, enough that finding the segment of a tile costs little. */
enum { TOKENS_UNPACKED = 1024 };

static void unpack_item(const void *context, int64_t number, char *memory) {
    const Job *job = context;
    const Unpack *call = job->call;
    int64_t start = call->start + number % job->parts * TOKENS_UNPACKED, head = number / job->parts % call->heads;
    job->level->unpack(call, number / job->parts / call->heads, head, start, smaller_of(start + TOKENS_UNPACKED, call->stop), memory);
}

EXPORTED int64_t kvpack_unpack(const Unpack *call) {
    Job job = {call, level_of(call->level), ceiling(call->stop - call->start, TOKENS_UNPACKED), 0};
    return kvpack_for_each(unpack_item, &job, job.parts * call->heads * call->batch, call->threads, job.level->unpack_bytes(call));
}

/* Number of tokens per item of encoding, which are whole token groups of any size. */
enum { TOKENS_ENCODED = 512 };

static void encode_item(const void *context, int64_t number, char *memory) {
    const Job *job = context;
    const Encode *call = job->call;
    int64_t start = number % job->parts * TOKENS_ENCODED, stop = smaller_of(start + TOKENS_ENCODED, call->tokens);
    int64_t head = number / job->parts % call->heads;
    if (!atomic_load(job->refused) && !job->level->encode(call, number / job->parts / call->heads, head, start, stop, memory))
        atomic_store(job->refused, 1);
}

EXPORTED int64_t kvpack_encode(const Encode *call) {
    atomic_int refused = 0;
    Job job = {call, level_of(call->level), ceiling(call->tokens, TOKENS_ENCODED), &refused};
    int failed = kvpack_for_each(encode_item, &job, job.parts * call->heads * call->batch, call->threads, job.level->encode_bytes(call));
    return failed ? 1 : atomic_load(&refused) ? 2 : 0;
}

static void measure_item(const void *context, int64_t number, char *memory) {
    const Job *job = context;
    const Encode *call = job->call;
    (void)memory;
    job->level->measure(call, number / job->parts / call->heads, number / job->parts % call->heads, number % job->parts);
}

EXPORTED int64_t kvpack_measure(const Encode *call) {
    Job job = {call, level_of(call->level), ceiling(call->tokens, call->mean_tokens), 0};
    return kvpack_for_each(measure_item, &job, job.parts * call->heads * call->batch, call->threads, 1);
}

/* A token that may be stored raw. The candidates with the lowest `key`, which orders them, get slots. */
typedef struct {
    float key;
    int64_t token;
} Candidate;

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static int by_key(const void *a, const void *b) {
    const Candidate *x = a, *y = b;
    return x->key != y->key ? (x->key > y->key) - (x->key < y->key) : (x->token > y->token) - (x->token < y->token);
}

static int by_token(const void *a, const void *b) {
    int64_t x = ((const Candidate *)a)->token, y = ((const Candidate *)b)->token;
    return (x > y) - (x < y);
}

/* The lower median of those of `count` norms that are not NaN; NaN if all of them are. */
static float median_of(const float *norms, int64_t count, float *sorted) {
    int64_t numbers = 0;
    for (int64_t i = 0; i < count; i++)
        if (norms[i] == norms[i]) sorted[numbers++] = norms[i];
    qsort(sorted, numbers, sizeof(float), by_value);
    return numbers ? sorted[(numbers - 1) / 2] : NAN;
}

/* Compares the heads of tokens [first, stop) with the medians of tokens [begin, stop). `large` receives 1 if the norm of some head is above
   `high` times the head's median, otherwise 0. `most` receives the largest norm relative to its head's median, or 0 if no head is that
   large, and `least` the smallest one, but at least 1. With `shared`, both are computed; with `grouped`, only `most`. `all` are the norms
   over all heads. */
static void relative_heads(const RawSlots *call, const float *norms, const float *all, float median_of_all, int64_t begin, int64_t first,
                           int64_t stop, int shared, float *large, float *most, float *least, float *sorted) {
    int64_t count = stop - begin;
    float ratio = call->grouped && !(call->high && call->high < call->grouped) ? call->grouped : call->high;
    for (int64_t t = 0; t < stop - first; t++) large[t] = most[t] = 0, least[t] = INFINITY;
    for (int64_t h = 0; h < call->heads; h++, norms += call->tokens) {
        /* Whether one norm is that large can be decided without the median: it exceeds `ratio` times more than half of them. */
        float largest = 0;
        int64_t below = 0, numbers = 0;
        for (int64_t t = first; t < stop; t++) {
            largest = norms[t] > largest ? norms[t] : largest;
            if (call->shared && call->grouped && all[t] > 0 && norms[t] / (all[t] / median_of_all) > largest)
                largest = norms[t] / (all[t] / median_of_all);
        }
        if (ratio)
            for (int64_t t = begin; t < stop; t++) below += norms[t] * ratio < largest, numbers += norms[t] == norms[t];
        if (below <= (numbers - 1) / 2 && !shared) continue;
        float median = median_of(norms + begin, count, sorted);
        for (int64_t t = first; t < stop; t++) {
            if (call->high && norms[t] > call->high * median && median > 0) large[t - first] = 1;
            float relative = median > 0 ? norms[t] / median : INFINITY;
            if (relative < least[t - first]) least[t - first] = relative;
            if (median > 0 && relative > most[t - first]) most[t - first] = relative;
        }
    }
    for (int64_t t = 0; t < stop - first; t++) least[t] = least[t] > 1 ? least[t] : 1;
}

static int is_low(const RawSlots *call, float norm, float median) { return norm < call->low * median && isfinite(median); }

static int is_high(const RawSlots *call, float norm, float median) { return call->high && norm > call->high * median && median > 0; }

/* Corresponds to measure_fit_errors in formats/token_norms.py. `norm` is the norm over all heads, `median` is its usual value, and `most` and `least`
   are those of relative_heads. */
static float misfit_of(const RawSlots *call, float norm, float median, float most, float least) {
    float misfit = 0, wide = 0;
    if (call->shared && call->heads > 1 && norm > call->shared * median && median > 0) misfit = norm / median / least / call->shared;
    if (call->grouped && call->tokens > 2) wide = !call->shared ? most : norm > 0 ? most / (norm / median) : 0;
    return wide > call->grouped && wide / call->grouped > misfit ? wide / call->grouped : misfit;
}

static void choose_item(const void *context, int64_t layer, char *memory) {
    const Job *job = context;
    const RawSlots *call = job->call;
    Candidate *wanted = (Candidate *)memory;
    float *norms = (float *)(wanted + call->tokens), *large = norms + call->tokens, *most = large + call->page, *least = most + call->page;
    float *sorted = least + call->page;
    int64_t count = 0, lows = 0, highs = 0, *chosen = call->chosen + layer * call->slots;
    if (call->x.data) job->level->norms(call, layer);
    if (!call->slots && !call->low && !call->high && !call->shared && !call->grouped) return;
    const float *of_heads = call->norms + layer * call->heads * call->tokens;
    for (int64_t t = 0; t < call->tokens; t++) norms[t] = 0;
    for (int64_t h = 0; h < call->heads; h++)
        for (int64_t t = 0; t < call->tokens; t++) norms[t] += of_heads[h * call->tokens + t] * of_heads[h * call->tokens + t];
    for (int64_t t = 0; t < call->tokens; t++) norms[t] = sqrtf(norms[t]);
    Sizes sizes = {(const char *)of_heads, SIZE_FLOATS, 1, 0, call->heads, call->tokens, 1, call->page, call->high, 0};
    int relative = call->shared || call->grouped, uneven = relative || (call->high && job->level->have_large(&sizes));
    for (int64_t first = 0; first < call->tokens; first += call->page) {
        /* If the last tokens do not fill a page, they are compared with the median of the last `page` tokens. */
        int64_t stop = first + call->page, begin = first;
        if (stop > call->tokens) stop = call->tokens, begin = stop > call->page ? stop - call->page : 0;
        float least_norm = INFINITY, most_norm = 0;
        for (int64_t t = begin; t < stop; t++) {
            least_norm = norms[t] < least_norm ? norms[t] : least_norm;
            most_norm = norms[t] > most_norm ? norms[t] : most_norm;
        }
        int differ = least_norm < call->low * most_norm || (call->high && most_norm > call->high * least_norm);
        if (!uneven && !differ && first >= call->first) continue;
        /* If norms differ little, any of them can replace the median. */
        float median = differ || relative ? median_of(norms + begin, stop - begin, sorted) : least_norm;
        int shared = 0;
        for (int64_t t = first; t < stop; t++) shared |= call->shared && norms[t] > call->shared * median && median > 0;
        relative_heads(call, of_heads, norms, median, begin, first, stop, shared, large, most, least, sorted);
        int64_t by_head = 0;
        for (int64_t t = first; t < stop; t++)
            by_head += large[t - first] > 0 && t >= call->first && !is_low(call, norms[t], median) && !is_high(call, norms[t], median);
        for (int64_t t = first; t < stop; t++) {
            int low = is_low(call, norms[t], median) || t < call->first;
            int high = !low && (is_high(call, norms[t], median) || (by_head <= call->few && large[t - first] > 0));
            float misfit = misfit_of(call, norms[t], median, most[t - first], least[t - first]);
            lows += low, highs += high;
            if (low || high || misfit > 1) wanted[count++] = (Candidate){low ? norms[t] : high ? -norms[t] : FLT_MAX / misfit, t};
        }
    }
    int64_t used = smaller_of(count, call->slots);
    call->left_out[2 * layer] = count - used;
    /* Slots go to tokens of high norm first, then to tokens of low norm, which only reduce their own precision, and then to misfits. */
    call->left_out[2 * layer + 1] = count - lows - (used - smaller_of(used - smaller_of(used, highs), lows));
    if (count > used) {
        qsort(wanted, count, sizeof(Candidate), by_key);
        qsort(wanted, used, sizeof(Candidate), by_token);
    }
    for (int64_t i = 0; i < call->slots; i++) chosen[i] = i < used ? wanted[i].token : -1;
}

EXPORTED int64_t kvpack_raw_slots(const RawSlots *call) {
    Job job = {call, level_of(call->level), 0, 0};
    int64_t bytes = (int64_t)sizeof(Candidate) * call->tokens + (int64_t)sizeof(float) * (call->tokens + 4 * call->page);
    return kvpack_for_each(choose_item, &job, call->layers, call->threads, bytes);
}

EXPORTED int64_t kvpack_has_large(const Sizes *call) { return level_of(call->level)->have_large(call) ? 2 : 0; }

static void rans_item(const void *context, int64_t number, char *memory) {
    const Job *job = context;
    const Rans *call = job->call;
    int64_t first = MAX_CHUNKS * number;
    (void)memory;
    job->level->rans(call, first, (int)smaller_of(MAX_CHUNKS, call->chunks - first));
}

EXPORTED int64_t kvpack_rans(const Rans *call) {
    Job job = {call, level_of(call->level), 0, 0};
    return kvpack_for_each(rans_item, &job, ceiling(call->chunks, MAX_CHUNKS), call->threads, 1);
}

static void rans_encode_item(const void *context, int64_t number, char *memory) {
    const Job *job = context;
    const RansEncode *call = job->call;
    int64_t first = RANS_TOGETHER * number;
    (void)memory;
    job->level->rans_encode(call, first, (int)smaller_of(RANS_TOGETHER, call->chunks - first));
}

EXPORTED int64_t kvpack_rans_encode(const RansEncode *call) {
    Job job = {call, level_of(call->level), 0, 0};
    return kvpack_for_each(rans_encode_item, &job, ceiling(call->chunks, RANS_TOGETHER), call->threads, 1);
}

static void join_item(const void *context, int64_t number, char *memory) {
    const Job *job = context;
    const Join *call = job->call;
    int64_t start = number % job->parts * TOKENS_UNPACKED;
    (void)memory;
    job->level->join(call, number / job->parts, start, smaller_of(start + TOKENS_UNPACKED, call->tokens));
}

EXPORTED int64_t kvpack_join(const Join *call) {
    Job job = {call, level_of(call->level), ceiling(call->tokens, TOKENS_UNPACKED), 0};
    return kvpack_for_each(join_item, &job, job.parts * call->heads * call->batch, call->threads, 1);
}

static void split_item(const void *context, int64_t number, char *memory) {
    const Job *job = context;
    const Split *call = job->call;
    int64_t start = number % job->parts * TOKENS_UNPACKED;
    (void)memory;
    if (call->counts)
        job->level->count(call, number);
    else
        job->level->split(call, number / job->parts, start, smaller_of(start + TOKENS_UNPACKED, call->tokens));
}

EXPORTED int64_t kvpack_split(const Split *call) {
    Job job = {call, level_of(call->level), call->counts ? 1 : ceiling(call->tokens, TOKENS_UNPACKED), 0};
    return kvpack_for_each(split_item, &job, job.parts * call->heads * call->batch, call->threads, 1);
}

/* Adds words to a checksum of rows (spec/row.md): sum * X^words + the words times descending powers of X, modulo 2^64. */
EXPORTED uint64_t kvpack_checksum(const unsigned char *data, int64_t words, uint64_t sum) {
    enum { AT_ONCE = 16 };
    uint64_t power[AT_ONCE + 1] = {1};
    for (int i = 0; i < AT_ONCE; i++) power[i + 1] = power[i] * 0x9e3779b97f4a7c15u;
    for (; words >= AT_ONCE; words -= AT_ONCE, data += 4 * AT_ONCE) {
        uint64_t added = 0;
        for (int i = 0; i < AT_ONCE; i++) {
            uint32_t word;
            memcpy(&word, data + 4 * i, 4);
            added += word * power[AT_ONCE - 1 - i];
        }
        sum = sum * power[AT_ONCE] + added;
    }
    for (; words > 0; words--, data += 4) {
        uint32_t word;
        memcpy(&word, data, 4);
        sum = sum * power[1] + word;
    }
    return sum;
}
