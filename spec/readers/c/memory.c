/* Refusals, memory, and small helpers. */
#include "kvpack.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *const kv_kind_names[] = {"NotKvpack",      "UnsupportedVersion", "UnknownCodec",  "MissingBasis",
                                     "Truncated",      "DigestMismatch",     "LimitExceeded", "InvalidHeader",
                                     "InvalidPayload", "OutOfMemory"};
const char *const kv_dtype_names[] = {"U8", "U16", "F16", "BF16", "F32"};
const int kv_dtype_bytes[] = {1, 2, 2, 2, 4};

struct kv_block {
    kv_block *next;
    max_align_t start[];
};

/* Refuse the file. In the description of a packed page all that it breaks is one rule (row.md). */
_Noreturn void kv_fail(kv_reader *reader, kv_kind kind, const char *rule, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(reader->message, sizeof reader->message, format, values);
    va_end(values);
    if (reader->page && kind != OUT_OF_MEMORY && strncmp(rule, "row-", 4)) {
        kind = INVALID_HEADER;
        rule = "row-3";
    }
    reader->kind = kind;
    snprintf(reader->rule, sizeof reader->rule, "%s", rule);
    longjmp(reader->refused, 1);
}

/* Zeroed memory for `count` elements. */
void *kv_take(kv_reader *reader, uint64_t count, size_t size) {
    uint64_t bytes = kv_times(count, size);
    kv_block *block = NULL;
    if (bytes < SIZE_MAX - sizeof(kv_block) - sizeof(max_align_t))
        block = calloc(1, sizeof(kv_block) + (size_t)bytes + 1);
    if (!block)
        kv_fail(reader, OUT_OF_MEMORY, "front-15", "there is no memory for %llu bytes",
                (unsigned long long)bytes);
    block->next = reader->blocks;
    reader->blocks = block;
    return block->start;
}

/* Free what was taken after `mark` was the newest block. */
void kv_release(kv_reader *reader, kv_block *mark) {
    while (reader->blocks != mark) {
        kv_block *next = reader->blocks->next;
        free(reader->blocks);
        reader->blocks = next;
    }
}

void kv_free(kv_reader *reader) { kv_release(reader, NULL); }

uint64_t kv_times(uint64_t a, uint64_t b) { return b && a > UINT64_MAX / b ? UINT64_MAX : a * b; }

uint64_t kv_plus(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

uint64_t kv_little(const uint8_t *bytes, int count) {
    uint64_t number = 0;
    while (count--) number = number << 8 | bytes[count];
    return number;
}

bool kv_is(kv_bytes bytes, const char *text) {
    return bytes.size == strlen(text) && !memcmp(bytes.data, text, bytes.size);
}

/* Order by bytes, which for UTF-8 is that of code points. */
int kv_compare(kv_bytes a, kv_bytes b) {
    size_t common = a.size < b.size ? a.size : b.size;
    int order = common ? memcmp(a.data, b.data, common) : 0;
    return order ? order : (a.size > b.size) - (a.size < b.size);
}

/* Whether bytes are UTF-8 of shortest forms without surrogates. */
bool kv_utf8(kv_bytes text) {
    for (size_t i = 0; i < text.size;) {
        uint8_t lead = text.data[i++];
        int more = lead < 0x80   ? 0
                   : lead < 0xc2 ? -1
                   : lead < 0xe0 ? 1
                   : lead < 0xf0 ? 2
                   : lead < 0xf5 ? 3
                                 : -1;
        if (more < 0 || text.size - i < (size_t)more) return false;
        uint32_t point = more == 0 ? lead : lead & (0x3f >> more);
        for (int k = 0; k < more; k++) {
            uint8_t next = text.data[i++];
            if ((next & 0xc0) != 0x80) return false;
            point = point << 6 | (next & 0x3f);
        }
        if ((more == 2 && (point < 0x800 || (point >= 0xd800 && point < 0xe000))) ||
            (more == 3 && (point < 0x10000 || point > 0x10ffff)))
            return false;
    }
    return true;
}

float kv_float(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

float kv_half(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 31) return kv_float(sign | 0x7f800000 | fraction << 13);
    if (exponent) return kv_float(sign | (exponent + 112) << 23 | fraction << 13);
    float number = (float)fraction * 0x1p-24f;
    return sign ? -number : number;
}

/* A binary32 correctly rounded to binary16. */
uint16_t kv_to_half(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    uint32_t exponent = bits >> 23 & 255, fraction = (bits & 0x7fffff) | 0x800000;
    if (exponent == 255) return (uint16_t)(sign | 0x7c00 | (bits & 0x7fffff ? 0x200 : 0));
    if (exponent < 102) return sign;
    unsigned shift = exponent < 113 ? 126 - exponent : 13;
    uint32_t rest = fraction & ((1u << shift) - 1), half = 1u << (shift - 1);
    uint32_t kept = fraction >> shift;
    kept += rest > half || (rest == half && (kept & 1));
    if (exponent >= 113) kept += (exponent - 113) << 10;
    return (uint16_t)(sign | (kept > 0x7c00 ? 0x7c00 : kept));
}

float kv_number(kv_dtype dtype, const uint8_t *data, uint64_t index) {
    const uint8_t *at = data + index * (uint64_t)kv_dtype_bytes[dtype];
    uint32_t bits = (uint32_t)kv_little(at, kv_dtype_bytes[dtype]);
    switch (dtype) {
    case F16: return kv_half((uint16_t)bits);
    case BF16: return kv_float(bits << 16);
    case F32: return kv_float(bits);
    default: return (float)bits;
    }
}

bool kv_all_finite(kv_dtype dtype, const uint8_t *data, uint64_t count) {
    uint32_t mask = dtype == F16 ? 0x7c00 : dtype == BF16 ? 0x7f80 : 0x7f800000;
    if (dtype == U8 || dtype == U16) return true;
    for (uint64_t i = 0; i < count; i++)
        if ((kv_little(data + i * (uint64_t)kv_dtype_bytes[dtype], kv_dtype_bytes[dtype]) & mask) == mask)
            return false;
    return true;
}

/* Append to a text. */
void kv_put(kv_text *text, const char *format, ...) {
    va_list values;
    for (;;) {
        va_start(values, format);
        int size =
            vsnprintf(text->data ? text->data + text->size : NULL, text->room - text->size, format, values);
        va_end(values);
        if (size >= 0 && text->size + (size_t)size < text->room) {
            text->size += (size_t)size;
            return;
        }
        size_t room = 2 * (text->room + (size_t)size + 64);
        char *data = kv_take(text->reader, room, 1);
        if (text->size) memcpy(data, text->data, text->size);
        text->data = data;
        text->room = room;
    }
}

void kv_put_json(kv_text *text, kv_bytes string) {
    kv_put(text, "\"");
    for (size_t i = 0; i < string.size; i++) {
        uint8_t c = string.data[i];
        if (c == '"' || c == '\\' || c < 32 || c == 127) kv_put(text, "\\u%04x", c);
        else kv_put(text, "%c", c);
    }
    kv_put(text, "\"");
}
