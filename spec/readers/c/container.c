/* The file: its JSON header, its tensors, and its digests (container.md). */
#include "kvpack.h"

#include <stdio.h>
#include <string.h>

#define BEGINNING "{\"__metadata__\":{\"format\":\"kvpack\",\"kvpack\":\""

static uint64_t aligned(uint64_t size, uint64_t unit) { return (size + unit - 1) / unit * unit; }

/* A decimal number without leading zeros; returns its digits, or 0 if there is none. */
static size_t read_decimal(kv_bytes bytes, size_t at, size_t most, uint64_t *number) {
    size_t count = 0;
    *number = 0;
    while (at + count < bytes.size && bytes.data[at + count] >= '0' && bytes.data[at + count] <= '9' &&
           count <= most)
        *number = *number * 10 + (uint64_t)(bytes.data[at + count++] - '0');
    return count > 1 && bytes.data[at] == '0' ? 0 : count;
}

static void check_major(kv_reader *r, kv_bytes bytes, size_t at) {
    uint64_t major;
    if (at == bytes.size) kv_fail(r, TRUNCATED, "container-4", "the file ends within the major number");
    size_t digits = read_decimal(bytes, at, 9, &major);
    if (!digits || digits > 9 || !major)
        kv_fail(r, INVALID_HEADER, "container-5", "the major number has another form");
    if (at + digits == bytes.size)
        kv_fail(r, TRUNCATED, "container-4", "the file ends within the major number");
    uint8_t next = bytes.data[at + digits];
    if (next != ' ' && (next != '"' || major == 1))
        kv_fail(r, INVALID_HEADER, "container-5", "the major number has another form");
    if (major > 1)
        kv_fail(r, UNSUPPORTED_VERSION, "container-6", "a later version, %llu, wrote the file",
                (unsigned long long)major);
}

typedef struct {
    kv_reader *reader;
    kv_bytes bytes;
    size_t at, end;
} json;

static void expect(json *j, const char *text) {
    size_t size = strlen(text);
    if (j->end - j->at < size || memcmp(j->bytes.data + j->at, text, size))
        kv_fail(j->reader, INVALID_HEADER, "container-5",
                "byte %llu of the file is not that of the JSON header", (unsigned long long)j->at);
    j->at += size;
}

static void open_header(kv_file *file) {
    kv_reader *r = file->reader;
    kv_bytes bytes = file->bytes;
    size_t at = 8 + strlen(BEGINNING);
    if (bytes.size < at || memcmp(bytes.data + 8, BEGINNING, at - 8))
        kv_fail(r, NOT_KVPACK, "container-5", "the file does not begin as a kvpack file does");
    check_major(r, bytes, at);
    uint64_t length = kv_little(bytes.data, 8), size;
    if (length > 16777216)
        kv_fail(r, LIMIT_EXCEEDED, "container-29", "the JSON header has %llu bytes",
                (unsigned long long)length);
    if (8 + length > bytes.size) kv_fail(r, TRUNCATED, "container-4", "the file ends within its JSON header");
    if ((8 + length) % 4096) kv_fail(r, INVALID_HEADER, "container-3", "8 + L is not a multiple of 4096");
    json j = {r, bytes, at, (size_t)(8 + length)};
    expect(&j, "1 ");
    const uint8_t *digest = bytes.data + j.at;
    uint8_t given[16] = {0}, found[16];
    for (int i = 0; i < 32; i++) {
        static const char hexadecimal[] = "0123456789abcdef";
        const char *digit = j.end - j.at < 33 ? NULL : memchr(hexadecimal, digest[i], 16);
        if (!digit) kv_fail(r, INVALID_HEADER, "container-5", "the digest of kvpack.header has another form");
        given[i / 2] = (uint8_t)(given[i / 2] << 4 | (digit - hexadecimal));
    }
    j.at += 32;
    expect(&j, "\"},\"kvpack.header\":{\"dtype\":\"U8\",\"shape\":[");
    size_t digits = read_decimal((kv_bytes){bytes.data, j.end}, j.at, 8, &size);
    if (!digits || digits > 7)
        kv_fail(r, INVALID_HEADER, "container-5", "the size of kvpack.header has another form");
    char text[64];
    snprintf(text, sizeof text, "%llu],\"data_offsets\":[0,%llu]}", (unsigned long long)size,
             (unsigned long long)size);
    expect(&j, text);
    if (size > 8388608)
        kv_fail(r, LIMIT_EXCEEDED, "container-29", "kvpack.header has %llu bytes", (unsigned long long)size);
    file->data = 8 + length;
    if (bytes.size - file->data < size)
        kv_fail(r, TRUNCATED, "container-4", "the file ends within kvpack.header");
    file->header = (kv_bytes){bytes.data + file->data, (size_t)size};
    kv_xxh3(file->header.data, (size_t)size, found);
    if (memcmp(given, found, 16))
        kv_fail(r, DIGEST_MISMATCH, "container-20", "kvpack.header does not have its digest");
    kv_look_for_new(r, file->header);
    file->end = j.at; /* where the rest of the JSON header begins, until the range is known */
}

static void expect_tensor(json *j, const char *name, const kv_tensor *tensor, uint64_t from, uint64_t to) {
    char text[100];
    bool bytes = !tensor || tensor->zstd;
    snprintf(text, sizeof text, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", name,
             kv_dtype_names[bytes ? U8 : tensor->dtype]);
    expect(j, text);
    uint64_t whole = to - from;
    unsigned rank = bytes ? 1 : tensor->rank;
    for (unsigned i = 0; i < rank; i++) {
        snprintf(text, sizeof text, "%s%llu", i ? "," : "",
                 (unsigned long long)(bytes ? whole : tensor->shape[i]));
        expect(j, text);
    }
    snprintf(text, sizeof text, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)from,
             (unsigned long long)to);
    expect(j, text);
}

/* Place the tensors, and compare the rest of the JSON header. */
static void check_json(kv_file *file, size_t at) {
    json j = {file->reader, file->bytes, at, (size_t)file->data};
    uint64_t offset = file->header.size;
    unsigned pads = 0;
    for (uint64_t i = 0; i < file->tensor_count; i++) {
        kv_tensor *tensor = &file->tensors[i];
        uint64_t start = aligned(offset, 64);
        if (start != offset) {
            char name[32];
            snprintf(name, sizeof name, "kvpack.pad.%u", pads++);
            expect_tensor(&j, name, NULL, offset, start);
        }
        tensor->offset = start;
        offset = kv_plus(start, tensor->stored);
        if (offset >= (uint64_t)1 << 60)
            kv_fail(file->reader, LIMIT_EXCEEDED, "container-29", "the file is too large");
        expect_tensor(&j, tensor->name, tensor, start, offset);
    }
    expect(&j, "}");
    if (aligned(j.at, 4096) != file->data)
        kv_fail(file->reader, INVALID_HEADER, "container-5", "the JSON header has too many spaces");
    while (j.at < j.end) expect(&j, " ");
    if (file->bytes.size - file->data != offset)
        kv_fail(file->reader, TRUNCATED, "container-4",
                "the tensors take %llu bytes, and %llu follow the JSON header", (unsigned long long)offset,
                (unsigned long long)(file->bytes.size - file->data));
}

/* Plan the next tensor, which must be what the header lists. */
kv_tensor *kv_plan(kv_file *file, const char *name, kv_dtype dtype, unsigned rank, const uint64_t *shape) {
    kv_reader *r = file->reader;
    kv_tensor *tensor = &file->tensors[file->tensor_count];
    bool page = r->page;
    if (!page && file->tensor_count == file->listed->number)
        kv_fail(r, INVALID_HEADER, "container-16", "the tensor %s is not listed", name);
    snprintf(tensor->name, sizeof tensor->name, "%s", name);
    tensor->dtype = dtype;
    tensor->rank = rank;
    tensor->count = 1;
    bool empty = false;
    for (unsigned i = 0; i < rank; i++) {
        tensor->shape[i] = shape[i];
        empty = empty || !shape[i];
    }
    for (unsigned i = 0; i < rank; i++) tensor->count = empty ? 0 : kv_times(tensor->count, shape[i]);
    tensor->bytes = kv_times(tensor->count, (uint64_t)kv_dtype_bytes[dtype]);
    if (page) {
        tensor->stored = tensor->bytes;
        file->tensor_count++;
        return tensor;
    }
    kv_value *item = &file->listed->items[file->tensor_count++], *parts = item->items;
    static const kv_type types[] = {V_STRING, V_STRING, V_ARRAY, V_STRING, V_INTEGER, V_BINARY};
    bool right = item->type == V_ARRAY && item->number == 6;
    for (int i = 0; right && i < 6; i++) right = parts[i].type == types[i];
    for (uint64_t i = 0; right && i < parts[2].number; i++) right = parts[2].items[i].type == V_INTEGER;
    if (!right || parts[5].bytes.size != 16)
        kv_fail(r, INVALID_HEADER, "container-11", "the tensor %s is listed in another form", name);
    right = kv_is(parts[0].bytes, name) && kv_is(parts[1].bytes, kv_dtype_names[dtype]) &&
            parts[2].number == rank;
    for (unsigned i = 0; right && i < rank; i++) right = parts[2].items[i].number == shape[i];
    if (!right) kv_fail(r, INVALID_HEADER, "container-16", "the tensor %s is not what is listed", name);
    tensor->zstd = kv_is(parts[3].bytes, "zstd");
    if (!tensor->zstd && !kv_is(parts[3].bytes, "none"))
        kv_fail(r, INVALID_HEADER, "container-11", "the filter of %s is not known", name);
    tensor->stored = parts[4].number;
    tensor->digest = parts[5].bytes.data;
    if (!tensor->zstd && (tensor->stored != tensor->bytes || tensor->bytes == UINT64_MAX))
        kv_fail(r, INVALID_HEADER, "container-17", "%s has other bytes than its shape takes", name);
    if (tensor->zstd && tensor->bytes > kv_times(tensor->stored, 256))
        kv_fail(r, LIMIT_EXCEEDED, "container-29", "%s has more than 256 times its stored bytes", name);
    return tensor;
}

kv_file *kv_open(kv_reader *reader, kv_bytes bytes) {
    kv_file *file = kv_take(reader, 1, sizeof *file);
    file->reader = reader;
    file->bytes = bytes;
    open_header(file);
    size_t at = (size_t)file->end;
    kv_read_header(file, kv_parse(reader, file->header));
    check_json(file, at);
    uint64_t decoded = 0;
    for (uint64_t i = 0; i < file->tensor_count; i++) decoded = kv_plus(decoded, file->tensors[i].bytes);
    if (decoded > reader->limit)
        kv_fail(reader, LIMIT_EXCEEDED, "container-29", "the tensors take %llu bytes",
                (unsigned long long)decoded);
    return file;
}

/* Check the pads and digests of all tensors, and undo their filters. */
static void load(kv_file *file) {
    kv_reader *r = file->reader;
    uint64_t end = file->header.size;
    for (uint64_t i = 0; i < file->tensor_count; i++) {
        kv_tensor *tensor = &file->tensors[i];
        const uint8_t *data = file->bytes.data + file->data;
        for (; end < tensor->offset; end++)
            if (data[end])
                kv_fail(r, INVALID_PAYLOAD, "container-19", "the pad before %s is not zero", tensor->name);
        end = tensor->offset + tensor->stored;
        uint8_t digest[16];
        kv_xxh3(data + tensor->offset, (size_t)tensor->stored, digest);
        if (memcmp(digest, tensor->digest, 16))
            kv_fail(r, DIGEST_MISMATCH, "container-20", "%s does not have its digest", tensor->name);
        tensor->data = data + tensor->offset;
        if (tensor->zstd) {
            uint8_t *content = kv_take(r, tensor->bytes, 1);
            kv_block *mark = r->blocks;
            kv_zstd(r, (kv_bytes){tensor->data, (size_t)tensor->stored}, content, tensor->bytes,
                    file->checksums);
            kv_release(r, mark);
            tensor->data = content;
        }
    }
}

/* Check every byte of a file and every rule of its codecs. */
void kv_check(kv_file *file) {
    kv_reader *r = file->reader;
    if (file->data) load(file);
    for (uint64_t i = 0; i < file->tensor_count; i++) {
        kv_tensor *tensor = &file->tensors[i];
        if (!tensor->any && !kv_all_finite(tensor->dtype, tensor->data, tensor->count))
            kv_fail(r, INVALID_PAYLOAD, "front-13", "%s has a number that is not finite", tensor->name);
    }
    for (unsigned l = 0; l < file->layer_count; l++)
        for (int which = 0; which < 2; which++)
            if (file->layers[l].sides[which]) {
                kv_check_codec(file, file->layers[l].sides[which]);
                kv_check_cars(file, file->layers[l].sides[which]);
            }
    if (file->basis) kv_check_basis(file);
}
