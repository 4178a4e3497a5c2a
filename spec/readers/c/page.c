/* Packed pages of serving engines (row.md). */
#include "kvpack.h"

#include <string.h>

static uint64_t padded(uint64_t size) { return (size + 63) / 64 * 64; }

static uint64_t checksum(kv_bytes page) {
    uint64_t sum = 0;
    for (size_t i = 0; i < page.size; i += 4)
        sum = sum * 0x9e3779b97f4a7c15u + (i == 24 || i == 28 ? 0 : kv_little(page.data + i, 4));
    return sum;
}

/* The first bytes, the length and the checksum. */
static kv_bytes open_page(kv_reader *r, kv_bytes bytes) {
    if (bytes.size < 128)
        kv_fail(r, TRUNCATED, "row-1", "a packed page has at least 128 bytes, and there are %u",
                (unsigned)bytes.size);
    if (memcmp(bytes.data, "kvpack-row 1\n\0\0", 16))
        kv_fail(r, memcmp(bytes.data, "kvpack-row ", 11) ? NOT_KVPACK : UNSUPPORTED_VERSION, "row-1",
                "the bytes do not begin as a packed page of this version");
    uint64_t length = kv_little(bytes.data + 16, 8);
    if (length < 128 || length > ((uint64_t)1 << 32) - 64 || length % 64)
        kv_fail(r, INVALID_HEADER, "row-2", "a packed page cannot have %llu bytes",
                (unsigned long long)length);
    if (length > bytes.size)
        kv_fail(r, TRUNCATED, "row-2", "the packed page has %llu bytes, and there are %llu",
                (unsigned long long)length, (unsigned long long)bytes.size);
    kv_bytes page = {bytes.data, (size_t)length};
    if (checksum(page) != kv_little(bytes.data + 24, 8))
        kv_fail(r, DIGEST_MISMATCH, "row-4", "the packed page does not have its checksum");
    return page;
}

/* What container.md allows and a description does not. */
static void check_description(kv_file *file) {
    kv_reader *r = file->reader;
    static const char *const features[] = {"balanced", "key-mean", "log-norms", "raw-positions",
                                           "token-scale-per-head"};
    static const char *const dtypes[] = {"bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2", "u8"};
    for (uint64_t i = 0; i < file->required->number; i++) {
        bool known = false;
        for (int k = 0; k < 5; k++) known = known || kv_is(file->required->items[i].bytes, features[k]);
        if (!known)
            kv_fail(r, INVALID_HEADER, "row-3",
                    "a description needs a feature that packed pages do not have");
    }
    kv_bytes data = {NULL, 0};
    bool known = false;
    for (int k = 0; kv_feature(file, "page-dtype", &data) && k < 6; k++)
        known = known || kv_is(data, dtypes[k]);
    if (!known || file->ignorable->number != 1)
        kv_fail(r, INVALID_HEADER, "row-3",
                "the ignorable features of a description are not page-dtype alone");
    if (!file->layer_count) kv_fail(r, INVALID_HEADER, "row-3", "a packed page has no layers");
    const kv_side *first = file->layers[0].sides[0];
    bool values = file->layers[0].sides[1] != NULL;
    for (unsigned l = 0; l < file->layer_count; l++)
        for (int which = 0; which < 2; which++) {
            const kv_side *side = file->layers[l].sides[which];
            if (!side != (which && !values) || !first)
                kv_fail(r, INVALID_HEADER, "row-3", "layer %u of a packed page has other sides", l);
            if (!side) continue;
            if (side->batch != 1 || side->run_count != 1 || side->tail || side->window ||
                side->heads != first->heads || side->packed != first->packed)
                kv_fail(r, INVALID_HEADER, "row-3",
                        "a side of layer %u has a shape that packed pages do not have", l);
            const kv_codec *codec = side->codec;
            if (codec->cars & (1u << S_OUTLIERS | 1u << S_TOKENS) || codec->id == C_LOSSLESS ||
                codec->id == C_TRANSFORM)
                kv_fail(r, INVALID_HEADER, "row-3", "a side of layer %u has a stream of items", l);
            if (kv_is(data, "u8") && codec->id != C_OPAQUE)
                kv_fail(r, INVALID_HEADER, "row-6", "layer %u of a page of bytes is not opaque", l);
        }
}

kv_file *kv_open_page(kv_reader *r, kv_bytes bytes) {
    kv_bytes page = open_page(r, bytes);
    uint64_t size = kv_little(page.data + 96, 4), at = 128 + padded(size);
    for (int i = 100; i < 128; i++)
        if (page.data[i]) kv_fail(r, INVALID_HEADER, "row-3", "a spare byte of the page header is not zero");
    if (at > page.size)
        kv_fail(r, INVALID_HEADER, "row-3", "the description does not end within the packed page");
    kv_file *file = kv_take(r, 1, sizeof *file);
    file->reader = r;
    file->bytes = page;
    file->header = (kv_bytes){page.data + 128, (size_t)size};
    r->page = true;
    kv_read_header(file, kv_parse(r, file->header));
    check_description(file);
    kv_plan_all(file);
    r->page = false;
    for (uint64_t i = 128 + size; i < at; i++)
        if (page.data[i]) kv_fail(r, INVALID_HEADER, "row-3", "padding is not zero");
    for (uint64_t i = 0; i < file->tensor_count; i++) {
        kv_tensor *tensor = &file->tensors[i];
        uint64_t end = kv_plus(at, tensor->bytes);
        if (end > page.size || padded(end) > page.size)
            kv_fail(r, INVALID_HEADER, "row-2", "the packed page ends within %s", tensor->name);
        tensor->data = page.data + at;
        for (at = padded(end); end < at; end++)
            if (page.data[end]) kv_fail(r, INVALID_HEADER, "row-3", "padding is not zero");
    }
    if (at != page.size)
        kv_fail(r, INVALID_HEADER, "row-2", "the packed page has bytes after its last padding");
    return file;
}
