/* The functions that the kernels of one instruction set provide, and the memory of a thread. */
#ifndef KVPACK_LEVEL_H
#define KVPACK_LEVEL_H

#include "interface.h"

/* Maximum number of query rows of an item, and number of rows in its buffers. The last block of four may contain unused rows. */
enum { MAX_ROWS = 64, ROW_SPACE = MAX_ROWS + 4 };

/* The maximum number of rANS chunks decoded together. */
enum { MAX_CHUNKS = 4 };

/* The maximum number of rANS chunks encoded together. */
enum { RANS_TOGETHER = 2 };

/* Attention of query rows [first, first + rows) of one head with tokens [start, stop) of a span. */
typedef struct {
    const Span *span;
    int64_t batch, head, first, rows, start, stop;
} Item;

typedef struct {
    const char *name;
    /* The number of bytes that a thread needs for a call, and the computation of one item in that memory. Its results are its part of the
       softmax [ROW_SPACE] and sums [ROW_SPACE][v dim]. */
    int64_t (*attend_bytes)(const Attend *call);
    void (*attend)(const Attend *call, const Item *item, char *memory, float *largest, float *total, float *sums);
    /* The same for unpacking tokens [start, stop) of one head. */
    int64_t (*unpack_bytes)(const Unpack *call);
    void (*unpack)(const Unpack *call, int64_t batch, int64_t head, int64_t start, int64_t stop, char *memory);
    /* The same for encoding. The item returns 0 if a value is refused. */
    int64_t (*encode_bytes)(const Encode *call);
    int (*encode)(const Encode *call, int64_t batch, int64_t head, int64_t start, int64_t stop, char *memory);
    /* One page of kvpack_measure. */
    void (*measure)(const Encode *call, int64_t batch, int64_t head, int64_t page);
    /* The norms of the tokens of one layer. */
    void (*norms)(const RawSlots *call, int64_t layer);
    /* All of kvpack_has_large. */
    int64_t (*have_large)(const Sizes *call);
    /* Up to MAX_CHUNKS chunks. */
    void (*rans)(const Rans *call, int64_t first, int count);
    /* Up to RANS_TOGETHER chunks. */
    void (*rans_encode)(const RansEncode *call, int64_t first, int count);
    /* Tokens [start, stop) of one head of one sequence. */
    void (*join)(const Join *call, int64_t head, int64_t start, int64_t stop);
    void (*split)(const Split *call, int64_t head, int64_t start, int64_t stop);
    void (*count)(const Split *call, int64_t head);
} Level;

extern const Level kvpack_v4, kvpack_v3, kvpack_portable;

#endif
