/* A reader of kvpack 1 in C11, written from the text of the specification alone.
 *
 * Everything that a call takes from memory belongs to a kv_reader and is freed with it. A file that breaks a
 * rule makes the reader jump back to its caller (kv_fail), so the code between has no paths for errors. */
#ifndef KVPACK_H
#define KVPACK_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Classes of refusals (README.md, Refusals). */
typedef enum {
    NOT_KVPACK,
    UNSUPPORTED_VERSION,
    UNKNOWN_CODEC,
    MISSING_BASIS,
    TRUNCATED,
    DIGEST_MISMATCH,
    LIMIT_EXCEEDED,
    INVALID_HEADER,
    INVALID_PAYLOAD,
    OUT_OF_MEMORY /* not a refusal of the file */
} kv_kind;

extern const char *const kv_kind_names[];

typedef struct {
    const uint8_t *data;
    size_t size;
} kv_bytes;

typedef struct kv_block kv_block;
typedef struct kv_file kv_file;

typedef struct {
    jmp_buf refused; /* where kv_fail jumps to */
    kv_kind kind;
    char rule[20];
    char message[240];
    uint64_t limit; /* the bytes that the caller allows for decoded tensors, and again for values */
    bool page;      /* while the description of a packed page is read */
    kv_block *blocks;
    const kv_bytes *bases; /* the bases that the caller gives */
    size_t base_count;
    kv_file **opened; /* those of them that were needed */
} kv_reader;

_Noreturn void kv_fail(kv_reader *reader, kv_kind kind, const char *rule, const char *format, ...);
void *kv_take(kv_reader *reader, uint64_t count, size_t size);
void kv_release(kv_reader *reader, kv_block *mark);
void kv_free(kv_reader *reader);

/* Products and sums that stay at UINT64_MAX where they would exceed it (rule container-30). */
uint64_t kv_times(uint64_t a, uint64_t b);
uint64_t kv_plus(uint64_t a, uint64_t b);

uint64_t kv_little(const uint8_t *bytes, int count);
bool kv_is(kv_bytes bytes, const char *text);
int kv_compare(kv_bytes a, kv_bytes b);
bool kv_utf8(kv_bytes text);

/* Numbers. */
typedef enum { U8, U16, F16, BF16, F32 } kv_dtype;

extern const char *const kv_dtype_names[];
extern const int kv_dtype_bytes[];

float kv_float(uint32_t bits);
float kv_half(uint16_t bits);
uint16_t kv_to_half(float number);
float kv_number(kv_dtype dtype, const uint8_t *data, uint64_t index);
bool kv_all_finite(kv_dtype dtype, const uint8_t *data, uint64_t count);

/* Digests. */
void kv_xxh3(const uint8_t *data, size_t size, uint8_t digest[16]);
uint64_t kv_xxh64(const uint8_t *data, size_t size);
void kv_sha256(const uint8_t *data, size_t size, uint8_t digest[32]);

/* msgpack. */
typedef enum { V_INTEGER, V_STRING, V_BINARY, V_NIL, V_ARRAY, V_MAP } kv_type;

typedef struct kv_value {
    kv_type type;
    uint64_t number;        /* of an integer; the elements of an array; the members of a map */
    kv_bytes bytes;         /* of a string or binary value */
    struct kv_value *items; /* elements, or keys and values by turns */
} kv_value;

kv_value *kv_parse(kv_reader *reader, kv_bytes bytes);
void kv_look_for_new(kv_reader *reader, kv_bytes bytes);

/* zstd. */
void kv_zstd(kv_reader *reader, kv_bytes frame, uint8_t *content, uint64_t size, bool checksum);

/* Packing, generator and rotation. */
typedef struct {
    char name[20];
    unsigned symbols, digits, fields;
    unsigned base[2], alphabet[2];
    unsigned columns, bytes, planes; /* W, Q and the planes */
} kv_packing;

bool kv_pack_sizes(kv_packing *packing);
uint64_t kv_default_bytes(unsigned symbols, unsigned base);
void kv_unpack(kv_reader *reader, const kv_packing *packing, const uint8_t *const planes[], uint64_t row,
               uint32_t *digits);
uint64_t kv_generate(uint64_t *state);
void kv_quaternion(uint64_t *state, double quaternion[4]);
void kv_signs(uint64_t seed, unsigned count, int8_t *signs);
bool kv_rotates(unsigned order);
void kv_rotate_back(const double *u, double *x, unsigned order, const int8_t *signs);
float kv_norm8(uint8_t code);

/* The header. */
typedef enum {
    C_ANGLE,
    C_GROUP,
    C_KLT,
    C_LOSSLESS,
    C_MINIFLOAT,
    C_OCTAHEDRAL,
    C_OPAQUE,
    C_POLAR,
    C_QUATERNION,
    C_RAW,
    C_SCALAR,
    C_TRANSFORM,
    C_TRELLIS,
    CODECS
} kv_codec_id;

extern const char *const kv_codec_names[];

typedef enum {
    S_BALANCED,
    S_SCALE,
    S_ORDER,
    S_BLOCK,
    S_MEAN,
    S_OUTLIERS,
    S_QJL,
    S_TOKENS,
    S_POSITIONS
} kv_car;

#define MAX_PACKINGS 12
#define MAX_STREAMS 80 /* of a side: klt has at most 64 planes and 4 others */

typedef struct {
    kv_codec_id id;
    unsigned dim, group; /* the head dim, and the token group */
    unsigned bits, bits_high, size, secondary, bins, levels, step, chunk, layer;
    unsigned choice[6]; /* the values of parameters that are strings, as numbers in the order of the text */
    uint64_t seed, rotation_seed;
    unsigned rotation; /* 0: none, 1: hadamard, 2: signed-hadamard */
    kv_dtype dtype, norm;
    kv_bytes table, high_table, high_channels, widths, basis;
    uint8_t level_bits[16]; /* of polar */
    kv_packing packings[MAX_PACKINGS];
    unsigned packing_count, outlier_packing, qjl_packing;
    unsigned cars; /* a bit for each side-car */
    unsigned block, mean_bits, balanced_layer, balanced_frame;
    kv_dtype scale_dtype, order_dtype, qjl_dtype, tokens_dtype, positions_dtype;
    kv_bytes balanced_basis;
    uint64_t qjl_seed;
    int8_t *signs, *qjl_signs;
    float *directions; /* codewords of quaternion; cosines and sines of polar */
} kv_codec;

typedef struct {
    char name[56];
    kv_dtype dtype;
    unsigned rank;
    uint64_t shape[8];
    uint64_t count, bytes; /* the elements, and the bytes of them */
    bool zstd, any;        /* whether it is compressed, and whether any bytes are valid */
    uint64_t stored, offset;
    const uint8_t *digest;
    const uint8_t *data; /* what kv_check has found right */
} kv_tensor;

typedef struct {
    kv_codec *codec;
    unsigned layer, which; /* 0: keys, 1: values */
    uint64_t batch, heads, run_count, packed, tail, groups, window;
    uint64_t *runs;
    kv_dtype tail_dtype;
    kv_value *entries;
    kv_tensor *tensors;
    unsigned tensor_count, entry_count;
    unsigned planes[MAX_PACKINGS]; /* the tensor of the first plane of every packing */
    float *early;                  /* values that were decoded for all tokens at once */
    uint8_t *symbols;              /* exponent fields of lossless */
    uint64_t *outliers;            /* the first outlier item of every token, sequence and head */
} kv_side;

typedef struct {
    unsigned layer;
    char name[32];
    kv_tensor *tensor;
} kv_state;

typedef struct {
    kv_side *sides[2];
    uint64_t start;
} kv_layer;

struct kv_file {
    kv_reader *reader;
    kv_bytes bytes, header;
    kv_value *required, *ignorable, *listed; /* the last: what the header lists as tensors */
    uint64_t start, end, data;               /* the range, and the place of the data section */
    kv_codec *codecs;
    unsigned codec_count, layer_count, state_count;
    kv_layer *layers;
    kv_state *states;
    kv_tensor *tensors;
    uint64_t tensor_count;
    bool basis, checksums;
    unsigned sequences; /* of the sides and states, 1 without any */
};

kv_file *kv_open(kv_reader *reader, kv_bytes bytes);
kv_file *kv_open_page(kv_reader *reader, kv_bytes bytes);
void kv_read_header(kv_file *file, kv_value *map);
void kv_plan_all(kv_file *file);
void kv_read_features(kv_file *file);
bool kv_required(const kv_file *file, const char *name);
bool kv_feature(const kv_file *file, const char *name, kv_bytes *data);
void kv_read_codec(kv_reader *reader, const kv_value *map, kv_codec *codec);
bool kv_rows_per_run(const kv_codec *codec);
void kv_plan_side(kv_file *file, kv_side *side);
kv_tensor *kv_plan(kv_file *file, const char *name, kv_dtype dtype, unsigned rank, const uint64_t *shape);
kv_tensor *kv_stream(const kv_side *side, const char *name);

/* Maps of the header, key by key. */
typedef struct {
    kv_reader *reader;
    const kv_value *map;
    uint64_t at;
    const char *keys, *values; /* the rules of keys, and of types and ranges */
} kv_cursor;

bool kv_key_is(const kv_cursor *cursor, const char *key);
const kv_value *kv_next(kv_cursor *cursor, const char *key, kv_type type);
uint64_t kv_integer(kv_cursor *cursor, const char *key, uint64_t low, uint64_t high);
unsigned kv_choice(kv_cursor *cursor, const char *key, const char *const *choices);
kv_bytes kv_binary(kv_cursor *cursor, const char *key, uint64_t size);
void kv_end(kv_cursor *cursor);

/* Checks and values. */
void kv_check(kv_file *file);
uint64_t kv_value_count(const kv_side *side);
void kv_decode(kv_file *file, kv_side *side, float *values);

/* The place of a token: its sequence, head, number over all runs, run, number in the run, and row of its
 * token group. */
typedef struct {
    uint64_t sequence, head, token, run, in_run, group;
} kv_place;

uint64_t kv_at(const kv_side *side, const kv_place *place, uint64_t rows, uint64_t row);
float kv_per_token(const kv_side *side, const kv_place *place, const char *name);
void kv_digits(kv_file *file, const kv_side *side, const kv_place *place, unsigned packing, uint32_t *digits);
void kv_prepare_codec(kv_reader *reader, kv_codec *codec);
void kv_check_codec(kv_file *file, kv_side *side);
void kv_decode_token(kv_file *file, kv_side *side, const kv_place *place, float *u);
void kv_check_segments(kv_file *file, kv_side *side);
void kv_check_klt(kv_file *file, kv_side *side);
void kv_decode_klt(kv_file *file, kv_side *side);
void kv_decode_transform(kv_file *file, kv_side *side);
void kv_check_cars(kv_file *file, kv_side *side);

/* rANS. */
void kv_rans_table(kv_reader *reader, const uint8_t *frequencies, unsigned symbols, uint16_t *table,
                   uint8_t *slots);
uint64_t kv_rans(kv_reader *reader, const uint8_t *states, kv_bytes words, uint64_t count,
                 const uint16_t *const *tables, const uint8_t *const *slots, uint64_t per_table,
                 uint8_t *symbols);

/* Bases. */
void kv_check_basis_header(kv_file *file);
void kv_check_basis(kv_file *file);
kv_file *kv_basis(kv_file *file, kv_bytes digest, const char *rule);
kv_tensor *kv_basis_state(const kv_file *basis, unsigned layer, const char *name);
unsigned kv_basis_vectors(unsigned dim);

/* Facts beside the values. */
typedef struct kv_text kv_text;
void kv_write_facts(kv_file *file, kv_text *text);
struct kv_text {
    kv_reader *reader;
    char *data;
    size_t size, room;
};
void kv_put(kv_text *text, const char *format, ...);
void kv_put_json(kv_text *text, kv_bytes string);

#endif
