/* A reader of kvpack 1 in C11, written from the text of the specification alone. What a call takes from
 * memory belongs to a kv_reader. What breaks a rule makes it jump back to its caller: nothing has paths for
 * errors. */
#ifndef KVPACK_H
#define KVPACK_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64; /* what printf takes as %llu */
_Static_assert(sizeof(u64) == 8, "products wrap at 64 bits");

typedef struct {
  const u8 *data;
  u64 size;
} kv_bytes;

typedef struct kv_file kv_file;
typedef struct kv_side kv_side;
typedef struct kv_block {
  struct kv_block *next;
  max_align_t start[];
} kv_block;

typedef struct {
  jmp_buf refused;       /* where a refusal continues */
  const char *kind;      /* its class (README.md, Refusals), or OutOfMemory */
  char rule[20];         /* the number of the broken rule */
  char message[240];     /* what is wrong */
  const kv_bytes *bases; /* the bases that the caller gives */
  u64 base_count, limit; /* limit: the bytes that it allows for decoded tensors, and again for values */
  kv_file **opened;      /* those of them that were needed */
  bool page;             /* while the description of a packed page is read */
  kv_block *blocks;
} kv_reader;

/* What callers use: open, check every byte and rule, decode a side to [batch, kv_head, token, channel]. */
kv_file *kv_open(kv_reader *r, kv_bytes bytes);
kv_file *kv_open_page(kv_reader *r, kv_bytes bytes);
void kv_check(kv_file *f);
u64 kv_value_count(const kv_side *side);
void kv_decode(kv_file *f, kv_side *side, float *values);
void kv_free(kv_reader *r);

/* Entries of a store (store.md): an identity field, or a key of encryption and its id. */
typedef struct {
  kv_bytes name, value;
} kv_named;

/* What a caller looks for: the entry key; the parent, or the chunk of states, or NULL to take any; the
 * identity fields by the names of store.md without the tenant, or NULL to take any identity and start. */
typedef struct {
  const u8 *key, *parent;
  const kv_named *fields, *secrets; /* no secrets: entries are in the clear */
  u64 field_count, secret_count;
  kv_bytes tenant;
  u64 start, limit; /* the position of the first token, and the most bytes of an entry */
  bool states;      /* whether the entry is of states */
} kv_wanted;

void kv_root_key(kv_reader *r, const kv_wanted *wanted, u8 key[32]); /* the parent of a first chunk */
kv_file *kv_open_entry(kv_reader *r, kv_bytes entry, const kv_wanted *wanted);

typedef enum { U8, U16, F16, BF16, F32 } kv_dtype;
typedef enum { ARRAY = 'a', BINARY = 'b', INTEGER = 'i', MAP = 'm', NIL = 'n', STRING = 's' } kv_type;
typedef struct kv_value {
  char type;
  u64 number;             /* an integer; the elements of an array; the members of a map */
  kv_bytes bytes;         /* of a string or binary value */
  struct kv_value *items; /* elements, or keys and values by turns */
} kv_value;

typedef struct {
  char name[20];
  u32 symbols, digits, fields, base[2], alphabet[2], columns, bytes, planes; /* W, Q and the planes */
} kv_packing;

/* The header. */
enum { ANGLE, GROUP, KLT, LOSSLESS, MINIFLOAT, OCTAHEDRAL, OPAQUE, POLAR };
enum { QUATERNION = POLAR + 1, RAW, SCALAR, TRANSFORM, TRELLIS, CODECS };
enum { BALANCED, SCALE, ORDER, BLOCK, MEAN, OUTLIERS, QJL, TOKENS, POSITIONS, CARS };
enum { LOG_NORMS = CARS, HEAD_SCALES }; /* no sidecars, but also features that a codec needs */

#define MAX_DIM 1024
#define MAX_PACKINGS 12
#define MAX_STREAMS 80 /* of a side: klt has at most 64 planes and 4 others */
#define MAX_TOKENS 1099511627775u

typedef struct {
  char key[32];
  u64 number;     /* an integer; of a string, the number of its word */
  kv_bytes bytes; /* of a string or bytes */
} kv_parameter;

typedef struct {
  u32 radii, pairs, bits, codes, tables; /* radii and pairs below a level, and where codes and tables begin */
  bool unequal;                          /* whether the last pair has a table of its own */
} kv_level;

typedef struct {
  u32 id, cars, levels, radii; /* cars: a bit for each sidecar; levels, radii: of polar */
  kv_parameter parameters[32];
  kv_packing packings[MAX_PACKINGS];
  u32 parameter_count, packing_count, own_packings, flags, sketch; /* the packings of outliers and of qjl */
  bool split, by_head, ranged; /* codes in two parts; widths by head; scales of 8 bits */
  u64 dim, group, low;         /* the head dim, the token group, the base of the lower part */
  u64 heads, row_bytes;        /* of klt by heads: heads, and the bytes of a row */
  kv_level level[10];          /* of polar */
  signed char *signs, *qjl_signs;
  float *directions; /* codewords of quaternion; cosines and sines of polar */
} kv_codec;

typedef struct {
  char name[56];
  kv_dtype dtype;
  u32 rank;
  u64 shape[8], count, bytes, stored, offset; /* count, bytes: the elements, and the bytes of them */
  bool zstd, any;                             /* whether it is compressed, and whether any bytes are valid */
  const u8 *digest, *data;                    /* data: what kv_check has found right */
} kv_tensor;

struct kv_side {
  kv_codec *codec;
  u32 layer, which;                                                        /* 0: keys, 1: values */
  u64 batch, heads, rows, run_count, packed, tail, groups, window, tokens; /* rows: sequences times heads */
  kv_dtype tail_dtype;
  const kv_value *entries;
  kv_tensor *tensors;
  u32 tensor_count, entry_count, planes[MAX_PACKINGS]; /* planes: the tensor of the first one of a packing */
  float *early;                                        /* values that were decoded for all tokens at once */
  u8 *symbols;                                         /* exponent fields of lossless */
  u64 *runs, *outliers;                                /* outliers: the first item of every row and token */
};

typedef struct {
  u32 layer;
  char name[32];
  kv_tensor *tensor;
} kv_state;

struct kv_file {
  kv_reader *r;
  kv_bytes bytes, header, recipe;
  const kv_value *required, *ignorable, *model, *listed; /* listed: what the header lists as tensors */
  u64 start, end, data;                                  /* the range, and the place of the data section */
  u32 codec_count, layer_count, side_count, state_count;
  kv_codec *codecs;
  struct {
    kv_side *sides[2];
    u64 start;
  } *layers;
  kv_side **sides; /* those that there are, in order */
  kv_state *states;
  kv_tensor *tensors;
  u64 tensor_count, fewest, most; /* fewest, most: sequences of a side or state */
  bool basis, checksums;
};

#endif
