/* The structures that library.py passes to C: each has a ctypes twin there, which checks all sizes. */
#ifndef KVPACK_INTERFACE_H
#define KVPACK_INTERFACE_H

#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

/* Changes with every structure or function in this file. library.py refuses a library with another number. */
#define KVPACK_INTERFACE 33

enum { HEAD_RUN = 5 };
enum { SIZE_FLOATS, SIZE_PAIRS, SIZE_POWERS };
enum { MAX_SIZES = 128 };
enum { MAX_PACKINGS = 12, MAX_DIGITS = 2, MAX_VALUES = 3, MAX_TABLES = 48, MAX_BOUNDS = 4 };

/* Codec families, and the dtypes of numbers that are stored per token. */
enum { RAW, GROUP, SCALAR, OCTAHEDRAL, ANGLE, POLAR, QUATERNION, MINIFLOAT, KLT, LOSSLESS, TRELLIS };
enum { F16, BF16, F32, U8, LOG8 };

/* One array [batch, kv_head, row, ...] with contiguous rows. Strides are in bytes. A segment has one array for each stored stream. */
typedef struct {
    const char *data;
    int64_t batch, head, row;
} Stream;

/* Consecutive tokens of one side that are in arrays of their own. `first` is counted from the layer's first token. */
typedef struct {
    int64_t first, tokens;
    Stream streams[];
} Segment;

/* A digit of a packing. Its fields start at bit `place` if every base is a power of two, and otherwise at the place value `weight`. */
typedef struct {
    int64_t base, bits, place;
    double weight;
} Digit;

/* A packing (formats/columns.py) with `planes` words per column. If `odd` is set, each word of the last plane contains two columns. */
typedef struct {
    int64_t symbols, width, planes, odd, binary, digits;
    Digit digit[MAX_DIGITS];
} Packing;

/* `count` numbers per token of one stream. For LOG8, they are bytes, and `table` has the number for each byte, followed by 255 bounds: the
   byte of a number is how many bounds are at most that number. */
typedef struct {
    int64_t count, dtype;
    const float *table;
} Values;

/* A table of `entries` floats. Every digit that a stored word can contain is below `entries`. */
typedef struct {
    const float *data;
    int64_t entries;
} Table;

/* `order` is 0 without a rotation, 1 for Sylvester's matrix, and otherwise the order of Paley's factor, whose matrix [order, order] is
   `paley`. `factors` [dim] multiply the channels of the original frame. */
typedef struct {
    int64_t order;
    const float *paley, *factors;
} Rotation;

/* A codec and its parameters. The streams of a segment are the planes of all packings, followed by `values`, and then by those of group and
   of the sidecars. */
typedef struct {
    int64_t family, dim, streams;
    int64_t packings, columns; /* columns: the words per token of all packings, bytes counted as words */
    Packing packing[MAX_PACKINGS];
    int64_t value_streams, numbers; /* numbers: of all value streams, per token */
    Values values[MAX_VALUES];
    int64_t token_group;
    /* group, minifloat: the channels of a group or block. group: the streams of scales along tokens, and of the table of 8-bit scales, or -1 */
    int64_t size, token_scale, scales_stream, table_stream;
    /* raw tokens: the stream of each token's entry, int32, negative without one, then that of entries, float [kv_head, entry, dim] in the
       coded frame; -1 without them */
    int64_t patch_stream;
    /* outliers: the stream of the first chunk of each token, int64, also of the token after the last, then that of chunks, four values in
       binary16 and their number; -1 without them */
    int64_t outlier_stream;
    /* key_mean: the stream of the codes of a page's channels, then that of scales in binary16; -1 without them. The tokens of a page, and the
       bits of a code */
    int64_t mean_stream, mean_tokens, mean_bits;
    /* qjl: whether the packing after `packings` holds signs and the last number is a norm, which is multiplied by sketch_size */
    int64_t sketches;
    Rotation sketch_rotation;
    float sketch_size;
    /* octahedral, angle, quaternion: whether one stream holds both digits of a symbol */
    int64_t direct;
    /* octahedral: the bits of a direction and of the index digit, and whether that holds the norm's bits or the sign digit does.
       trellis: the bits of a window, and of a value.
       octahedral, angle: the codes of a norm */
    int64_t index_bits, digit_bits, norm_with_index, norm_levels;
    /* angle, quaternion: whether two streams hold factors of the first digit. angle: the kind of norm. quaternion: the largest radius */
    int64_t factored, norm_kind;
    /* angle: the bins; 0, or the binary logarithm of a quarter of them, whose directions the tables hold */
    int64_t bins, quarter_bits;
    float highest;
    /* lossless: the stream of frequencies, 16-bit numbers of each run; then those of states and, for each chunk of token_group tokens, of
       two int64, its first word and the number of all words, and the words */
    int64_t chunk_stream;
    /* minifloat: the format of elements, codes of magnitude from `finite` on being none, and the kind of scales. lossless: the bits
       of fractions, 7 of bf16 or 10 of fp16 */
    int64_t fraction_bits, bias, finite, scale_kind;
    /* scalar: the channels of all parts in turn. klt: those of all packings, and then the places of their tables in the rows of a basis,
       whose stream is that of scales; and the place of the matrix there. heads_stream: -1, or where each head has its own widths the stream
       of the bytes that hold the codes of all heads; `channels` then holds the place where the numbers of each head begin, and of the end,
       and HEAD_RUN numbers of each run of at most 8 columns: its first byte, its width, its first channel, their number, and its table */
    const int32_t *channels;
    int64_t matrix_place, heads_stream;
    /* polar: for each level the stream and the first symbol of its angles, their number, and those of the first kind of pair */
    int64_t levels, radii;
    int64_t level_stream[MAX_PACKINGS], level_first[MAX_PACKINGS], level_angles[MAX_PACKINGS], level_equal[MAX_PACKINGS];
    Table table[MAX_TABLES];
} Codec;

/* One side of a span: a codec and its segments, `count` rows of 2 + 4 * codec->streams integers, ascending by `first`. */
typedef struct {
    const Codec *codec;
    const int64_t *segments;
    int64_t count;
} Side;

/* Tokens [start, stop) whose keys share a coded frame, and whose values share one. `queries` float [batch, kv_head, row, k dim] are scaled
   and in the keys' frame. `sums` [batch, kv_head, row, v dim] are in the values' frame. */
typedef struct {
    int64_t start, stop;
    Side k, v;
    const float *queries;
    float *sums;
} Span;

/* attend: rows are the query rows of one KV head, head-major; visible [batch, q_len, 2]: the tokens that a query sees, [begin, end).
   sink_logits [kv_head, row / q_len] or NULL; softcap 0: none. `level` is a number of kvpack_level_name. */
typedef struct {
    int64_t batch, heads, rows, q_len, v_dim;
    const int64_t *visible;
    const float *sink_logits;
    double softcap;
    const Span *spans;
    int64_t span_count, threads, level;
} Attend;

/* unpack: tokens [start, stop) of one side to `out` [batch, kv_head, token - start, dim] of a dtype, in the original frame.
   channel_scales float [batch, kv_head, 1, dim] multiply what is rotated back; without data there are none. past_caches: whether `out` is
   written around the processor's caches. */
typedef struct {
    int64_t batch, heads, start, stop;
    Side side;
    int64_t dtype;
    Rotation rotation;
    Stream channel_scales;
    Stream out;
    int64_t past_caches, threads, level;
} Unpack;

/* encode: converts x [batch, kv_head, token, dim] of a dtype to the codec's streams, in the order of a segment. */
typedef struct {
    int64_t batch, heads, tokens;
    const Codec *codec;
    Stream x;
    int64_t dtype;
    Rotation rotation;
    const Stream *streams;
    /* group: whether centers are zero, and 1 / ((2^bits - 1) / 2), rounded to binary32 */
    int64_t zero_center;
    float per_middle;
    /* Whether norms are those of formats/norm_rule.py that keep products right. octahedral: the candidates per coordinate, 0 for all, 4 for
       two of levels that are so evenly spaced that a line tells which */
    int64_t unbiased, candidates;
    int64_t scaled; /* scalar: whether rounding=scaled */
    /* scalar: the midpoints of each part's magnitudes. octahedral: those of magnitudes (for two candidates the magnitudes between the first
       and the last, for two of even levels the line's slope and offset) and of norms, the magnitudes, and 1 over the length of every point
       of the octahedron. quaternion: the secondary quaternions. Midpoints end in infinities. */
    Table bounds[MAX_BOUNDS];
    /* key_mean: float [batch, kv_head, page, dim], what is taken from the tokens of each page of mean_tokens, a multiple of 16; without data,
       nothing. kvpack_measure writes them: of minifloat, one largest magnitude instead of the means */
    Stream means;
    /* NULL or, if the codec stores directions, float [batch][kv_head][token]: the norms of the encoded vectors, and their errors relative
       to the norms. Rounding of the stored number does not count. */
    float *norms, *errors;
    /* minifloat: NULL, or [batch][token], which is 1 for tokens that are encoded as zeros and do not affect the scale of their run. */
    const uint8_t *skipped;
    int64_t mean_tokens, threads, level;
} Encode;

/* rans: `chunks` of formats/rans.py, each with 32 states, to symbols [chunk][stride] by tables of 4096 slots: `table` [chunk], or where
   `tables` [chunk][stride] is there, one of these for every symbol. `read` and `last` are the words that each has read, and its last
   states. */
typedef struct {
    const uint16_t *words;
    const int64_t *first_word;
    const uint32_t *states;
    const int64_t *lengths;
    const uint32_t *slots;
    const int64_t *table;
    const uint8_t *tables;
    uint8_t *symbols;
    int64_t *read;
    uint32_t *last;
    int64_t chunks, word_count, stride, threads, level;
} Rans;

/* How a symbol of frequency f and first slot s changes a state x: to x + bias + quotient * (4096 - f), where the quotient is the upper half
   of x * reciprocal, floor((2^64 - 1) / f) + 1: x / f, rounded down, and bias is s. Of f = 1 the reciprocal is 2^64 - 1, which makes the
   quotient x - 1, and bias is s + 4095. */
typedef struct {
    uint64_t reciprocal;
    uint32_t bias, frequency;
} RansStep;

/* rans encode: `symbols` [chunk][stride] uint8 by `steps` [table][256]; `table` and `tables` as for rans. A chunk's words end its row of
   `words` [chunk][stride]; `written` is their number, `states` [chunk][32] the first of decoding. */
typedef struct {
    const uint8_t *symbols;
    const int64_t *lengths, *table;
    const uint8_t *tables;
    const RansStep *steps;
    uint16_t *words;
    int64_t *written;
    uint32_t *states;
    int64_t chunks, stride, threads, level;
} RansEncode;

/* join: bf16 values of lossless. `exponents` [chunk of tokens][batch, kv_head][channels of its tokens], `longest` bytes per chunk and head;
   signs and fractions in one plane of words, channels c and c + dim / 2 in the bytes of word c. */
typedef struct {
    const uint8_t *exponents;
    Stream plane, out;
    int64_t batch, heads, tokens, dim, chunk, longest, threads, level;
} Join;

/* split: bf16 values `x` to exponents and `plane`, which join joins; or, where `counts` [batch, kv_head][256] is there, these alone: how often
   a head has each exponent. */
typedef struct {
    uint8_t *exponents;
    Stream plane, x;
    int64_t *counts;
    int64_t batch, heads, tokens, dim, chunk, longest, threads, level;
} Split;

/* raw slots: which tokens of each layer of a page are stored raw, by the norms of its keys x [layer, kv_head, token, dim]
   (formats/raw_positions.py, in_slots). `low`, `high`, `shared` and `grouped` are 0 where they choose none: `shared` is how many times too
   large for a head a scale that heads share may be, `grouped` how many times its usual norm a head may have in a token whose scales other
   tokens share. A page has at most `few` tokens that are large in one head alone. chosen [layer][slots] has the tokens in ascending order,
   then -1; left_out [layer][2] counts tokens without a slot, and those of them that cost others precision; norms [layer][kv_head][tokens] has all norms. Without slots and bounds, norms are all that is found. */
typedef struct {
    Stream x;
    int64_t dtype, layers, heads, tokens, dim, slots, page, few;
    float low, high, shared, grouped;
    float *norms;
    int64_t *chosen, *left_out;
    int64_t threads, level;
} RawSlots;

/* Sizes of tokens, `data` [layer][row][token][members]: floats, of one member; pairs of binary16, whose first are scales that add up as
   squares; or bytes, exponents of powers of two, whose largest counts. Layers are `stride` bytes apart. A page has at most MAX_SIZES
   tokens. */
typedef struct {
    const char *data;
    int64_t kind, layers, stride, rows, tokens, members, page;
    float ratio;
    int64_t level;
} Sizes;

/* One read of a file: `bytes` bytes from `offset` on are written to `data`. Threads count in `ended` the bytes that they have tried to
   read, and set `failed` if they could not read them. Both are 0 at first. */
typedef struct {
    int64_t offset, bytes;
    char *data;
    int64_t ended, failed;
} Read;

/* These return 0, or 1 if memory is insufficient. kvpack_encode returns 2 if formats/ must refuse a value. */
int64_t kvpack_encode(const Encode *call);
int64_t kvpack_measure(const Encode *call);
int64_t kvpack_attend(const Attend *call);
int64_t kvpack_unpack(const Unpack *call);
int64_t kvpack_rans(const Rans *call);
int64_t kvpack_rans_encode(const RansEncode *call);
int64_t kvpack_raw_slots(const RawSlots *call);

/* Returns 1 if a size exceeds `ratio` times the lower median of its page, ignoring NaN, and 0 otherwise (formats/token_norms.py,
   has_large). */
int64_t kvpack_has_large(const Sizes *call);

int64_t kvpack_join(const Join *call);
int64_t kvpack_split(const Split *call);

void *kvpack_reader_start(int descriptor, Read *reads, int64_t count, int64_t piece, int64_t threads, int64_t block);
void kvpack_reader_allow(void *reader, int64_t upto);
int64_t kvpack_reader_wait(void *reader, int64_t upto, int64_t milliseconds);
void kvpack_reader_stop(void *reader);

int64_t kvpack_interface(void);
int64_t kvpack_sizes(int64_t structure);
/* The instruction sets that this processor supports, best first. Returns NULL after the last one. */
const char *kvpack_level_name(int64_t level);

#endif
