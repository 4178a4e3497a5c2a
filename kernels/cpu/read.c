/* Bytes of a file to memory, and the XXH3-128 of parts of them, which are digested while they are in a core's cache. */
#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "interface.h"
#include "level.h"

/* What is read at once, and a block of a digest: as many stripes of 64 bytes as its secret has places for. */
enum { PIECE = 1 << 17, STRIPE = 64, BLOCK_STRIPES = 16, BLOCK = STRIPE * BLOCK_STRIPES, SECRET = 192, SUMS = 8 };

static const unsigned char secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define PRIME32_1 0x9e3779b1u
#define PRIME32_2 0x85ebca77u
#define PRIME32_3 0xc2b2ae3du
#define PRIME64_1 0x9e3779b185ebca87u
#define PRIME64_2 0xc2b2ae3d27d4eb4fu
#define PRIME64_3 0x165667b19e3779f9u
#define PRIME64_4 0x85ebca77c2b2ae63u
#define PRIME64_5 0x27d4eb2f165667c5u

/* A part that is being digested: `blocks` of it are in the sums. */
typedef struct {
    uint64_t sums[SUMS];
    int64_t blocks;
} Digesting;

static const Digesting beginning = {{PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1}, 0};

static uint64_t word_at(const unsigned char *data) {
    uint64_t word;
    memcpy(&word, data, 8);
    return word;
}

static uint64_t merged(const uint64_t *sums, const unsigned char *key, uint64_t start) {
    for (int i = 0; i < SUMS; i += 2) {
        unsigned __int128 product = (unsigned __int128)(sums[i] ^ word_at(key + 8 * i)) * (sums[i + 1] ^ word_at(key + 8 * i + 8));
        start += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    start = (start ^ start >> 37) * 0x165667919e3779f9u;
    return start ^ start >> 32;
}

/* Digests the blocks of a part whose first `held` bytes are there; a last block is only digested whole if bytes follow it. */
static void digest(Digesting *now, const Level *level, const unsigned char *data, int64_t length, int64_t held) {
    int64_t all = (length - 1) / BLOCK, blocks = (held / BLOCK < all ? held / BLOCK : all) - now->blocks;
    if (blocks <= 0) return;
    level->absorb(now->sums, data + now->blocks * BLOCK, blocks, 0, secret, SECRET - STRIPE);
    now->blocks += blocks;
}

static void finish(Digesting *now, const Level *level, const unsigned char *data, Part *part) {
    int64_t length = part->end - part->begin, done = now->blocks * BLOCK;
    level->absorb(now->sums, data + done, 0, (length - 1 - done) / STRIPE, secret, 0);
    level->absorb(now->sums, data + length - STRIPE, 0, 1, secret + SECRET - STRIPE - 7, 0);
    part->low = merged(now->sums, secret + 11, (uint64_t)length * PRIME64_1);
    part->high = merged(now->sums, secret + SECRET - STRIPE - 11, ~((uint64_t)length * PRIME64_2));
}

int64_t kvpack_read_parts(const Read *call, const Level *level) {
    Digesting now = beginning;
    int64_t held = 0, number = 0;
    while (held < call->size) {
        int64_t wanted = call->size - held < PIECE ? call->size - held : PIECE;
        int64_t count = pread(call->descriptor, call->memory + held, wanted, call->offset + held);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return 1;
        held += count;
        for (; number < call->parts; number++) {
            Part *part = &call->part[number];
            const unsigned char *data = call->memory + part->begin;
            digest(&now, level, data, part->end - part->begin, held - part->begin);
            if (held < part->end) break;
            finish(&now, level, data, part);
            now = beginning;
        }
    }
    return 0;
}
