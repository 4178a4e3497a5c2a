/* The structures that library.py passes to C: each has a ctypes twin there, which checks all sizes. */
#ifndef KVPACK_INTERFACE_H
#define KVPACK_INTERFACE_H

#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

/* Changes with every structure or function in this file. library.py refuses a library with another number. */
#define KVPACK_INTERFACE 37

enum { HEAD_RUN = 5 };
enum { SIZE_FLOATS, SIZE_PAIRS, SIZE_POWERS };
enum { MAX_SIZES = 128, SPAN = 16 };
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

/* A digit of a packing. If every base is a power of two, its fields start at bit `place`; otherwise, they start at place value `weight`. */
typedef struct {
    int64_t base, bits, place;
    double weight;
} Digit;

/* A packing (formats/columns.py) with `planes` words per column. If `odd` is set, each word of the last plane contains two columns. */
typedef struct {
    int64_t symbols, width, planes, odd, binary, digits;
    Digit digit[MAX_DIGITS];
} Packing;

/* `count` numbers per token of one stream. For LOG8, they are bytes. `table` then contains the number that each byte stands for,
   followed by 255 bounds: the byte of a number is how many bounds do not exceed the number. */
typedef struct {
    int64_t count, dtype;
    const float *table;
} Values;

/* A table of `entries` floats. Every digit that a stored word can contain is below `entries`. */
typedef struct {
    const float *data;
    int64_t entries;
} Table;

/* A rotation. `order` is 0 if there is none, 1 for Sylvester's matrix, and otherwise the order of Paley's factor, whose matrix
   [order, order] is `paley`. `factors` [dim] are multiplied with the channels of the original frame. */
typedef struct {
    int64_t order;
    const float *paley, *factors;
} Rotation;

/* A codec and its parameters. The streams of a segment are the planes of all packings, then those of `values`, then the other streams of
   the codec, then those of the sidecars. A stream index is -1 if the codec does not have the stream. */
typedef struct {
    int64_t family, dim, streams;
    int64_t packings, columns; /* columns: number of words per token of all packings; a byte of a column counts as a word */
    Packing packing[MAX_PACKINGS];
    int64_t value_streams, numbers; /* numbers: how many numbers per token all value streams have together */
    Values values[MAX_VALUES];
    int64_t group_tokens;
    /* group, minifloat: number of channels per group or block. group: indices of the streams of scales along tokens, and of the table of
       8-bit scales */
    int64_t size, token_scale, scales_stream, table_stream;
    /* raw tokens: index of a stream with the entry of each token, int32, negative for tokens that are not raw. The next stream contains the
       entries, float [kv_head, entry, dim] in the coded frame. */
    int64_t patch_stream;
    /* outliers: index of a stream with the first chunk of each token and of the token after the last, int64. The next stream contains the
       chunks: four values in binary16, and the number of the chunk. */
    int64_t outlier_stream;
    /* key_mean: index of the stream with the codes of each page's mean. The next stream contains the scales, in binary16. The number of
       tokens per page, and of bits per code. */
    int64_t mean_stream, mean_tokens, mean_bits;
    /* qjl: 1 if the packing after `packings` contains signs, and the last number is a norm, which is multiplied by sketch_size */
    int64_t sketches;
    Rotation sketch_rotation;
    float sketch_size;
    /* octahedral, angle, quaternion: 1 if one stream contains both digits of a symbol */
    int64_t direct;
    /* octahedral: number of bits of a direction and of the index digit; norm_with_index is 1 if the index digit contains the bits of the
       norm, and 0 if the sign digit contains them.
       trellis: number of bits of a window, and of a value.
       octahedral, angle: number of codes of a norm. */
    int64_t index_bits, digit_bits, norm_with_index, norm_levels;
    /* angle, quaternion: 1 if the first digit is split into two streams. angle: the kind of norm. quaternion: the largest radius code. */
    int64_t factored, norm_kind;
    /* angle: number of bins. quarter_bits is 0, or the base-2 logarithm of a quarter of this number if the tables cover a quarter turn. */
    int64_t bins, quarter_bits;
    float highest;
    /* lossless: index of the stream of frequencies, 16-bit numbers of each run. The next streams contain the states, two int64 for each
       chunk of group_tokens tokens (its first word, and the number of all words), and the words. */
    int64_t chunk_stream;
    /* minifloat: the format of elements, whose codes of magnitude `finite` and above are not finite, and the kind of scales. lossless:
       number of bits of a fraction, 7 for bf16 or 10 for fp16. */
    int64_t fraction_bits, bias, finite, scale_kind;
    /* scalar: the channels of all parts, one part after another.
       klt: the channels of all packings, one packing after another, and then the position of each channel's table in the rows of the basis,
       which are in scales_stream. matrix_place is the position of the matrix in these rows.
       klt with own widths for each head: heads_stream is the index of the stream with the bytes of all heads' codes. `channels` then
       contains the position at which the integers of each head begin, the position after the last head, and HEAD_RUN integers for each
       run of up to 8 columns: its first byte, width, first channel, number of channels, and the position of its table. */
    const int32_t *channels;
    int64_t matrix_place, heads_stream;
    /* polar: for each level, the index of the stream with its angles, the first symbol of the level in this stream, the number of angles,
       and how many of them belong to the first kind of pair. */
    int64_t levels, radii;
    int64_t level_stream[MAX_PACKINGS], level_first[MAX_PACKINGS], level_angles[MAX_PACKINGS], level_equal[MAX_PACKINGS];
    Table table[MAX_TABLES];
} Codec;

/* One side of a span: a codec, and `count` segments, ascending by their first token. A segment has 2 + 4 * codec->streams integers. */
typedef struct {
    const Codec *codec;
    const int64_t *segments;
    int64_t count;
} Side;

/* Tokens [start, stop) whose keys share one coded frame, and whose values share another. `queries`, float [batch, kv_head, row, k dim], are
   scaled and in the frame of the keys. `sums` [batch, kv_head, row, v dim] are in the frame of the values. */
typedef struct {
    int64_t start, stop;
    Side k, v;
    const float *queries;
    float *sums;
} Span;

/* A call of kvpack_attend. Rows are the query rows of one KV head, head by head. `visible` [batch, q_len, 2] contains the range of tokens
   [begin, end) that each query sees. `sink_logits` is [kv_head, row / q_len] or NULL. Without a softcap, `softcap` is 0. `level` is an
   argument of kvpack_level_name. */
typedef struct {
    int64_t batch, heads, rows, q_len, v_dim;
    const int64_t *visible;
    const float *sink_logits;
    double softcap;
    const Span *spans;
    int64_t span_count, threads, level;
} Attend;

/* A call of kvpack_unpack: converts tokens [start, stop) of one side to `out` [batch, kv_head, token - start, dim] of a dtype, in the
   original frame. Values are multiplied by `channel_scales`, float [batch, kv_head, 1, dim], after the inverse rotation, unless its data is
   NULL. If past_caches is 1, writes to `out` bypass the processor's caches. */
typedef struct {
    int64_t batch, heads, start, stop;
    Side side;
    int64_t dtype;
    Rotation rotation;
    Stream channel_scales;
    Stream out;
    int64_t past_caches, threads, level;
} Unpack;

/* A call of kvpack_encode: converts x [batch, kv_head, token, dim] of a dtype to the codec's streams, in the order of a segment. */
typedef struct {
    int64_t batch, heads, tokens;
    const Codec *codec;
    Stream x;
    int64_t dtype;
    Rotation rotation;
    const Stream *streams;
    /* group: 1 if centers are zero; and 1 / ((2^bits - 1) / 2), rounded to binary32. */
    int64_t zero_center;
    float per_middle;
    /* unbiased: 1 for norm_rule=unbiased (formats/norm_rule.py). octahedral: the number of candidates per coordinate. 0 stands for all,
       and 4 for two candidates whose levels are spaced so evenly that a line gives their index. */
    int64_t unbiased, candidates;
    int64_t scaled; /* scalar: 1 for rounding=scaled */
    /* scalar: the midpoints between each part's magnitudes.
       octahedral: the midpoints between magnitudes (for two candidates, the magnitudes except the first and the last; for candidates = 4,
       the slope and offset of the line), the midpoints between norms, the magnitudes, and the reciprocal norms of all points of the
       octahedron.
       quaternion: the secondary quaternions.
       Midpoints are followed by infinities. */
    Table bounds[MAX_BOUNDS];
    /* channel_scale: float [batch, kv_head, 1, dim], by which the values of each channel are divided first, unless its data is NULL. */
    Stream factors;
    /* key_mean: float [batch, kv_head, page, dim], subtracted from the tokens of each page of mean_tokens tokens (a multiple of SPAN),
       unless its data is NULL. kvpack_measure writes these means, multiplied by `share`. */
    Stream means;
    /* NULL, or [2][batch][kv_head][dim][span]: kvpack_measure writes the sum of squares of each channel over each span of SPAN tokens,
       first of values without their means, and then of whole values. */
    double *squares;
    float share;
    /* NULL or, if the codec stores directions, float [batch][kv_head][token]: the norms of the encoded vectors, and their errors relative
       to the norms. Errors do not include the rounding of stored norms. */
    float *norms, *errors;
    /* minifloat: NULL, or [batch][token] with 1 for tokens that are encoded as zeros and do not affect the scale of their run. */
    const uint8_t *skipped;
    int64_t mean_tokens, threads, level;
} Encode;

/* A call of kvpack_rans: decodes `chunks` chunks (formats/rans.py) with 32 states each to `symbols` [chunk][stride]. `slots` contains
   tables of 4096 slots. `table` [chunk] is the table of each chunk; if `tables` [chunk][stride] is not NULL, it contains the table of
   each symbol instead. `read` receives the number of words that each chunk has read, and `last` its final states. */
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

/* How a symbol of frequency f, whose first slot is s, changes a state x: to x + bias + quotient * (4096 - f). The quotient, x / f rounded
   down, is the upper half of x * reciprocal, the reciprocal is floor((2^64 - 1) / f) + 1, and the bias is s. For f = 1, the reciprocal is
   2^64 - 1, which gives the quotient x - 1, and the bias is s + 4095. */
typedef struct {
    uint64_t reciprocal;
    uint32_t bias, frequency;
} RansStep;

/* A call of kvpack_rans_encode: encodes `symbols` [chunk][stride] with `steps` [table][256]. `table` and `tables` are as in Rans. The
   words of a chunk are written to the end of its row of `words` [chunk][stride]; `written` receives their number, and `states`
   [chunk][32] the states with which decoding begins. */
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

/* A call of kvpack_join: joins the parts of bf16 values of the lossless codec. `exponents` is [chunk of tokens][batch, kv_head][channels of
   its tokens], with `longest` bytes per chunk and head. Signs and fractions are in one plane of words: channels c and c + dim / 2 are the
   bytes of word c. */
typedef struct {
    const uint8_t *exponents;
    Stream plane, out;
    int64_t batch, heads, tokens, dim, chunk, longest, threads, level;
} Join;

/* A call of kvpack_split: splits bf16 values `x` into `exponents` and `plane`, as in Join. If `counts` [batch, kv_head][256] is not
   NULL, it only counts how often each exponent occurs in a head. */
typedef struct {
    uint8_t *exponents;
    Stream plane, x;
    int64_t *counts;
    int64_t batch, heads, tokens, dim, chunk, longest, threads, level;
} Split;

/* A call of kvpack_raw_slots: chooses the tokens of each layer of a page that are stored raw, by the norms of its keys
   x [layer, kv_head, token, dim] (formats/raw_positions.py, store_in_slots). `low`, `high`, `shared` and `grouped` are 0 if they choose no
   tokens. `shared` bounds how many times too large for a head a scale shared by heads may be. If tokens share scales, `grouped` bounds the
   norm of a token in a head, relative to the head's typical norm. A page may have up to `few` tokens that are large in only one head. The
   first `first` tokens are chosen in any case. `chosen` [layer][slots] receives the tokens in ascending order, followed by -1. `left_out`
   [layer][2] receives the number of tokens without a slot, and how many of them cost other tokens precision. `norms`
   [layer][kv_head][tokens] receives all norms, contains them if x.data is NULL, or is NULL; without slots and bounds, nothing else is
   chosen. `largest`, of the same shape, receives the largest magnitude of each token, or is NULL. */
typedef struct {
    Stream x;
    int64_t dtype, layers, heads, tokens, dim, slots, page, few, first;
    float low, high, shared, grouped;
    float *norms, *largest;
    int64_t *chosen, *left_out;
    int64_t threads, level;
} RawSlots;

/* A call of kvpack_has_large. `data` [layer][row][token][members] determines the size of each token: one float; pairs of binary16 numbers,
   the first of which are scales whose squares are added; or bytes, exponents of powers of two, the largest of which counts. Layers are
   `stride` bytes apart. A page has up to MAX_SIZES tokens. */
typedef struct {
    const char *data;
    int64_t kind, layers, stride, rows, tokens, members, page;
    float ratio;
    int64_t level;
} Sizes;

/* One read of a file: `bytes` bytes from `offset` on are written to `data`. In `ended`, threads count the bytes that they have tried to
   read, and they set `failed` if they could not read them. Both are 0 initially. */
typedef struct {
    int64_t offset, bytes;
    char *data;
    int64_t ended, failed;
} Read;

/* These return 0, or 1 if there is not enough memory. kvpack_encode returns 2 if formats/ must refuse a value. */
int64_t kvpack_encode(const Encode *call);
int64_t kvpack_measure(const Encode *call);
int64_t kvpack_attend(const Attend *call);
int64_t kvpack_unpack(const Unpack *call);
int64_t kvpack_rans(const Rans *call);
int64_t kvpack_rans_encode(const RansEncode *call);
int64_t kvpack_raw_slots(const RawSlots *call);

/* Returns 2 if a size exceeds `ratio` times the lower median of its page, ignoring NaN, and 0 otherwise (formats/token_norms.py,
   has_large_size). */
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
