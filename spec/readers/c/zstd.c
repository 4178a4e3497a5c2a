/* Zstandard frames (RFC 8878), without dictionaries, and with nothing that RFC 8878 does not allow. */
#include "kvpack.h"

#include <string.h>

#define MAX_BLOCK (128u << 10)

typedef struct {
    uint16_t baseline;
    uint8_t symbol, bits;
} fse_cell;

typedef struct {
    fse_cell cells[512];
    int accuracy; /* -1: no table yet */
} fse_table;

typedef struct {
    kv_reader *reader;
    uint8_t *content;
    uint64_t size, made, block_limit, window;
    fse_table tables[3]; /* of literal lengths, offsets and match lengths */
    struct {
        uint8_t symbol, bits;
    } huffman[1 << 11];
    int huffman_bits; /* 0: no tree yet */
    uint64_t offsets[3];
    uint8_t literals[MAX_BLOCK];
    uint32_t literal_count;
} frame;

static _Noreturn void refuse(frame *f, const char *why) {
    kv_fail(f->reader, INVALID_PAYLOAD, "container-21", "the zstd frame is malformed: %s", why);
}

static int highest(uint32_t number) {
    int bit = -1;
    for (; number; number >>= 1) bit++;
    return bit;
}

/* Bits that are read from the last one backward. */
typedef struct {
    const uint8_t *data;
    int64_t left; /* the bits not read yet; below 0 if more were read than there are */
} bits;

static bits open_bits(frame *f, kv_bytes bytes) {
    if (!bytes.size || !bytes.data[bytes.size - 1]) refuse(f, "a stream of bits does not end with its mark");
    return (bits){bytes.data, (int64_t)(bytes.size - 1) * 8 + highest(bytes.data[bytes.size - 1])};
}

/* The `count` bits before, where zeros stand in for bits that are missing. */
static uint64_t peek(const bits *b, int count) {
    uint64_t value = 0;
    int64_t low = b->left - count;
    for (int64_t at = low < 0 ? 0 : low >> 3; at <= (b->left - 1) >> 3 && b->left > 0; at++) {
        int64_t shift = at * 8 - low;
        value |= shift < 0 ? (uint64_t)b->data[at] >> -shift : (uint64_t)b->data[at] << shift;
    }
    return count ? value & (~(uint64_t)0 >> (64 - count)) : 0;
}

static uint64_t take(bits *b, int count) {
    uint64_t value = peek(b, count);
    b->left -= count;
    return value;
}

static void build_table(frame *f, fse_table *table, const int16_t *chances, int symbols, int accuracy) {
    uint32_t size = 1u << accuracy, high = size, step = (size >> 1) + (size >> 3) + 3, at = 0;
    uint16_t next[256];
    for (int s = 0; s < symbols; s++) {
        next[s] = (uint16_t)(chances[s] < 0 ? 1 : chances[s]);
        if (chances[s] < 0) table->cells[--high].symbol = (uint8_t)s;
    }
    for (int s = 0; s < symbols; s++)
        for (int i = 0; i < chances[s]; i++) {
            table->cells[at].symbol = (uint8_t)s;
            do at = (at + step) & (size - 1);
            while (at >= high);
        }
    if (at) refuse(f, "a table of FSE does not fill its places");
    for (uint32_t i = 0; i < size; i++) {
        uint16_t n = next[table->cells[i].symbol]++;
        table->cells[i].bits = (uint8_t)(accuracy - highest(n));
        table->cells[i].baseline = (uint16_t)(((uint32_t)n << table->cells[i].bits) - size);
    }
    table->accuracy = accuracy;
}

static uint32_t forward(frame *f, kv_bytes bytes, size_t *at, int count) {
    uint32_t value = 0;
    if (*at + (size_t)count > bytes.size * 8) refuse(f, "a table of FSE is cut short");
    for (int i = 0; i < count; i++, ++*at) value |= (uint32_t)(bytes.data[*at / 8] >> (*at % 8) & 1) << i;
    return value;
}

/* Read the description of a table; returns its bytes. */
static size_t read_table(frame *f, kv_bytes bytes, fse_table *table, int max_accuracy, int max_symbols) {
    int16_t chances[256];
    size_t at = 0;
    int accuracy = (int)forward(f, bytes, &at, 4) + 5, symbols = 0;
    if (accuracy > max_accuracy) refuse(f, "the accuracy of a table is too large");
    int32_t left = 1 << accuracy;
    while (left > 0) {
        int count = highest((uint32_t)left + 1) + 1;
        uint32_t mask = (1u << (count - 1)) - 1, threshold = (1u << count) - 1 - ((uint32_t)left + 1);
        uint32_t value = forward(f, bytes, &at, count - 1);
        if (value >= threshold) {
            value |= forward(f, bytes, &at, 1) << (count - 1);
            if (value > mask) value -= threshold;
        }
        if (symbols >= max_symbols) refuse(f, "a table has too many symbols");
        chances[symbols] = (int16_t)((int)value - 1);
        left -= chances[symbols] < 0 ? 1 : chances[symbols];
        if (chances[symbols++] == 0)
            for (uint32_t zeros = 3; zeros == 3;) {
                zeros = forward(f, bytes, &at, 2);
                for (uint32_t i = 0; i < zeros; i++) {
                    if (symbols >= max_symbols) refuse(f, "a table has too many symbols");
                    chances[symbols++] = 0;
                }
            }
    }
    if (left) refuse(f, "the chances of a table have another sum");
    build_table(f, table, chances, symbols, accuracy);
    return (at + 7) / 8;
}

/* The weights of a Huffman tree that FSE codes: two states by turns. */
static int coded_weights(frame *f, kv_bytes bytes, uint8_t *weights) {
    fse_table table;
    size_t used = read_table(f, bytes, &table, 6, 256);
    bits b = open_bits(f, (kv_bytes){bytes.data + used, bytes.size - used});
    uint32_t states[2];
    states[0] = (uint32_t)take(&b, table.accuracy);
    states[1] = (uint32_t)take(&b, table.accuracy);
    if (b.left < 0) refuse(f, "the weights of a Huffman tree are cut short");
    for (int count = 0, turn = 0;; turn ^= 1) {
        if (count > 253) refuse(f, "a Huffman tree has too many weights");
        fse_cell cell = table.cells[states[turn]];
        weights[count++] = cell.symbol;
        states[turn] = cell.baseline + (uint32_t)take(&b, cell.bits);
        if (b.left < 0) {
            weights[count++] = table.cells[states[turn ^ 1]].symbol;
            return count;
        }
    }
}

static size_t read_tree(frame *f, kv_bytes bytes) {
    uint8_t weights[256] = {0};
    if (!bytes.size) refuse(f, "a Huffman tree is cut short");
    int head = bytes.data[0], count = head - 127;
    size_t used = (size_t)(head < 128 ? head : (count + 1) / 2);
    if (used > bytes.size - 1) refuse(f, "a Huffman tree is cut short");
    if (head < 128) count = coded_weights(f, (kv_bytes){bytes.data + 1, used}, weights);
    for (int i = 0; head >= 128 && i < count; i++) weights[i] = bytes.data[1 + i / 2] >> (i % 2 ? 0 : 4) & 15;
    uint32_t sum = 0;
    for (int i = 0; i < count; i++) {
        if (weights[i] > 11) refuse(f, "a Huffman tree is too deep");
        sum += weights[i] ? 1u << (weights[i] - 1) : 0;
    }
    int depth = highest(sum) + 1;
    if (!sum || depth > 11) refuse(f, "a Huffman tree is too deep");
    uint32_t rest = (1u << depth) - sum;
    if (rest & (rest - 1)) refuse(f, "the weights of a Huffman tree have no last one");
    weights[count++] = (uint8_t)(highest(rest) + 1);
    uint32_t at = 0, lowest = 0;
    for (int weight = 1; weight <= depth; weight++)
        for (int s = 0; s < count; s++)
            if (weights[s] == weight) {
                lowest += weight == 1;
                for (uint32_t i = 0; i < 1u << (weight - 1); i++, at++) {
                    f->huffman[at].symbol = (uint8_t)s;
                    f->huffman[at].bits = (uint8_t)(depth + 1 - weight);
                }
            }
    if (lowest < 2) refuse(f, "a Huffman tree has no codes of its depth");
    f->huffman_bits = depth;
    return used + 1;
}

static void read_stream(frame *f, kv_bytes bytes, uint8_t *out, uint32_t count) {
    bits b = open_bits(f, bytes);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t index = peek(&b, f->huffman_bits);
        out[i] = f->huffman[index].symbol;
        b.left -= f->huffman[index].bits;
        if (b.left < 0) refuse(f, "literals are cut short");
    }
    if (b.left) refuse(f, "literals leave bits");
}

/* Read the section of literals; returns its bytes. */
static size_t read_literals(frame *f, kv_bytes block) {
    const uint8_t *p = block.data;
    int kind = p[0] & 3, format = p[0] >> 2 & 3;
    size_t head = kind < 2 ? (size_t)(format == 1   ? 2
                                      : format == 3 ? 3
                                                    : 1)
                           : (size_t)(format < 2 ? 3 : format + 2);
    if (block.size < head) refuse(f, "literals are cut short");
    uint64_t number = kv_little(p, (int)head);
    if (kind < 2) {
        f->literal_count = (uint32_t)(number >> (format & 1 ? 4 : 3));
        size_t taken = kind == 0 ? f->literal_count : 1;
        if (f->literal_count > f->block_limit || block.size - head < taken)
            refuse(f, "literals are cut short");
        if (kind == 0) memcpy(f->literals, p + head, taken);
        else memset(f->literals, p[head], f->literal_count);
        return head + taken;
    }
    int width = format < 2 ? 10 : format == 2 ? 14 : 18;
    f->literal_count = (uint32_t)(number >> 4 & ((1u << width) - 1));
    size_t size = (size_t)(number >> (4 + width) & ((1u << width) - 1));
    if (f->literal_count > f->block_limit || block.size - head < size) refuse(f, "literals are cut short");
    kv_bytes bytes = {p + head, size};
    size_t tree = kind == 2 ? read_tree(f, bytes) : 0;
    if (!f->huffman_bits) refuse(f, "there is no Huffman tree");
    bytes = (kv_bytes){bytes.data + tree, bytes.size - tree};
    if (format == 0) {
        read_stream(f, bytes, f->literals, f->literal_count);
        return head + size;
    }
    if (bytes.size < 6 || f->literal_count < 6) refuse(f, "four streams of literals are cut short");
    uint32_t each = (f->literal_count + 3) / 4, done = 0;
    size_t at = 6;
    for (int i = 0; i < 4; i++) {
        size_t length = i < 3 ? (size_t)kv_little(bytes.data + 2 * i, 2) : bytes.size - at;
        if (length > bytes.size - at || (i == 3 && done > f->literal_count))
            refuse(f, "four streams of literals are cut short");
        uint32_t count = i < 3 ? each : f->literal_count - done;
        read_stream(f, (kv_bytes){bytes.data + at, length}, f->literals + done, count);
        at += length;
        done += count;
    }
    return head + size;
}

static const uint32_t length_bases[36] = {0,  1,  2,   3,   4,   5,    6,    7,    8,    9,     10,    11,
                                          12, 13, 14,  15,  16,  18,   20,   22,   24,   28,    32,    40,
                                          48, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536};
static const uint8_t length_bits[36] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  0,  1,  1,
                                        1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static const uint32_t match_bases[53] = {
    3,  4,  5,  6,  7,  8,  9,  10,  11,  12,  13,   14,   15,   16,   17,    18,    19,   20,
    21, 22, 23, 24, 25, 26, 27, 28,  29,  30,  31,   32,   33,   34,   35,    37,    39,   41,
    43, 47, 51, 59, 67, 83, 99, 131, 259, 515, 1027, 2051, 4099, 8195, 16387, 32771, 65539};
static const uint8_t match_bits[53] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  0,  0,  0, 0,
                                       0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,  0,  0,  0,  1,  1,  1, 1,
                                       2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
static const int16_t default_lengths[36] = {4, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1,  1,  2,  2,
                                            2, 2, 2, 2, 2, 2, 2, 3, 2, 1, 1, 1, 1, 1, -1, -1, -1, -1};
static const int16_t default_offsets[29] = {1, 1, 1, 1, 1, 1, 2, 2, 2, 1,  1,  1,  1,  1, 1,
                                            1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1};
static const int16_t default_matches[53] = {1, 4, 3, 2, 2, 2, 2, 2, 2, 1, 1,  1,  1,  1,  1,  1,  1, 1,
                                            1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1,  1,  1,  1,  1,  1, 1,
                                            1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1};

static size_t read_mode(frame *f, int which, int mode, kv_bytes bytes) {
    static const int accuracies[] = {9, 8, 9}, defaults[] = {6, 5, 6}, symbols[] = {36, 32, 53};
    static const int default_symbols[] = {36, 29, 53};
    static const int16_t *const chances[] = {default_lengths, default_offsets, default_matches};
    fse_table *table = &f->tables[which];
    if (mode == 0) {
        build_table(f, table, chances[which], default_symbols[which], defaults[which]);
        return 0;
    }
    if (mode == 1) {
        if (!bytes.size || bytes.data[0] >= symbols[which]) refuse(f, "a code of sequences does not exist");
        table->accuracy = 0;
        table->cells[0] = (fse_cell){0, bytes.data[0], 0};
        return 1;
    }
    if (mode == 2) return read_table(f, bytes, table, accuracies[which], symbols[which]);
    if (table->accuracy < 0) refuse(f, "there is no table to repeat");
    return 0;
}

static void put(frame *f, const uint8_t *from, uint64_t count) {
    if (count > f->size - f->made)
        kv_fail(f->reader, INVALID_PAYLOAD, "container-24", "a zstd frame makes more than its content size");
    if (count) memcpy(f->content + f->made, from, (size_t)count);
    f->made += count;
}

static uint64_t offset_of(frame *f, uint64_t value, bool no_literals) {
    uint64_t *o = f->offsets, found;
    if (value > 3) {
        found = value - 3;
    } else {
        uint64_t index = value - 1 + no_literals;
        found = index == 3 ? o[0] - 1 : o[index];
        if (index == 0) return found;
        if (index == 1) {
            o[1] = o[0];
            o[0] = found;
            return found;
        }
    }
    o[2] = o[1];
    o[1] = o[0];
    o[0] = found;
    return found;
}

static void read_sequences(frame *f, kv_bytes bytes) {
    uint32_t count, literal = 0;
    size_t at = 1;
    if (!bytes.size) refuse(f, "sequences are cut short");
    count = bytes.data[0];
    if (count > 127) {
        at = count == 255 ? 3 : 2;
        if (bytes.size < at) refuse(f, "sequences are cut short");
        count = count == 255 ? (uint32_t)kv_little(bytes.data + 1, 2) + 0x7f00
                             : (count - 128) << 8 | bytes.data[1];
    }
    if (!count) {
        if (at != bytes.size) refuse(f, "bytes follow no sequences");
        put(f, f->literals, f->literal_count);
        return;
    }
    if (at >= bytes.size || bytes.data[at] & 3) refuse(f, "the modes of sequences are malformed");
    int modes = bytes.data[at++];
    for (int i = 0; i < 3; i++)
        at += read_mode(f, i, modes >> (6 - 2 * i) & 3, (kv_bytes){bytes.data + at, bytes.size - at});
    bits b = open_bits(f, (kv_bytes){bytes.data + at, bytes.size - at});
    uint32_t states[3];
    for (int i = 0; i < 3; i++) states[i] = (uint32_t)take(&b, f->tables[i].accuracy);
    while (count--) {
        fse_cell cells[3];
        for (int i = 0; i < 3; i++) cells[i] = f->tables[i].cells[states[i]];
        uint64_t value = ((uint64_t)1 << cells[1].symbol) + take(&b, cells[1].symbol);
        uint64_t match = match_bases[cells[2].symbol] + take(&b, match_bits[cells[2].symbol]);
        uint64_t length = length_bases[cells[0].symbol] + take(&b, length_bits[cells[0].symbol]);
        if (count) {
            static const int order[] = {0, 2, 1};
            for (int i = 0; i < 3; i++)
                states[order[i]] = cells[order[i]].baseline + (uint32_t)take(&b, cells[order[i]].bits);
        }
        if (b.left < 0 || length > f->literal_count - literal) refuse(f, "sequences are cut short");
        put(f, f->literals + literal, length);
        literal += (uint32_t)length;
        uint64_t offset = offset_of(f, value, length == 0);
        if (!offset || offset > f->made || offset > f->window)
            refuse(f, "a match begins before the zstd window");
        if (match > f->size - f->made)
            kv_fail(f->reader, INVALID_PAYLOAD, "container-24",
                    "a zstd frame makes more than its content size");
        for (uint64_t i = 0; i < match; i++, f->made++) f->content[f->made] = f->content[f->made - offset];
    }
    if (b.left) refuse(f, "sequences leave bits");
    put(f, f->literals + literal, f->literal_count - literal);
}

/* Undo the filter of a tensor, whose content has `size` bytes. */
void kv_zstd(kv_reader *reader, kv_bytes bytes, uint8_t *content, uint64_t size, bool checksum) {
    frame *f = kv_take(reader, 1, sizeof *f);
    f->reader = reader;
    if (bytes.size < 5 || kv_little(bytes.data, 4) != 0xfd2fb528) refuse(f, "it does not begin as one");
    int head = bytes.data[4], single = head >> 5 & 1;
    static const int id_bytes[] = {0, 1, 2, 4}, size_bytes[] = {0, 2, 4, 8};
    int ids = id_bytes[head & 3], sizes = head >> 6 ? size_bytes[head >> 6] : single;
    size_t at = 5 + (size_t)!single;
    if (head & 8 || bytes.size < at + (size_t)(ids + sizes)) refuse(f, "its header is malformed");
    if (kv_little(bytes.data + at, ids))
        kv_fail(reader, INVALID_PAYLOAD, "container-25", "a zstd frame needs a dictionary");
    if (!sizes)
        kv_fail(reader, INVALID_PAYLOAD, "container-22", "a zstd frame does not give its content size");
    at += (size_t)ids;
    uint64_t given = kv_little(bytes.data + at, sizes) + (sizes == 2 ? 256 : 0);
    at += (size_t)sizes;
    if (given != size)
        kv_fail(reader, INVALID_PAYLOAD, "container-23", "a zstd frame has %llu bytes of content, not %llu",
                (unsigned long long)given, (unsigned long long)size);
    uint64_t base = (uint64_t)1 << (10 + (bytes.data[5] >> 3));
    f->window = single ? size : base + base / 8 * (bytes.data[5] & 7u);
    if (f->window > 8388608)
        kv_fail(reader, INVALID_PAYLOAD, "container-26", "a zstd window has more than 8388608 bytes");
    if (checksum && !(head & 4))
        kv_fail(reader, INVALID_PAYLOAD, "container-65", "a zstd frame has no checksum");
    f->block_limit = f->window < MAX_BLOCK ? f->window : MAX_BLOCK;
    f->content = content;
    f->size = size;
    for (int i = 0; i < 3; i++) f->tables[i].accuracy = -1;
    f->offsets[0] = 1;
    f->offsets[1] = 4;
    f->offsets[2] = 8;
    for (bool last = false; !last;) {
        if (bytes.size - at < 3) refuse(f, "it is cut short");
        uint32_t block = (uint32_t)kv_little(bytes.data + at, 3), kind = block >> 1 & 3, length = block >> 3;
        at += 3;
        last = block & 1;
        size_t taken = kind == 1 ? 1 : length;
        if (kind == 3 || length > f->block_limit || bytes.size - at < taken)
            refuse(f, "a zstd block is malformed");
        uint64_t before = f->made;
        if (kind == 0) {
            put(f, bytes.data + at, length);
        } else if (kind == 1) {
            if (length > f->size - f->made)
                kv_fail(reader, INVALID_PAYLOAD, "container-24",
                        "a zstd frame makes more than its content size");
            if (length) memset(f->content + f->made, bytes.data[at], length);
            f->made += length;
        } else {
            if (length < 2) refuse(f, "a zstd block is malformed");
            size_t used = read_literals(f, (kv_bytes){bytes.data + at, length});
            read_sequences(f, (kv_bytes){bytes.data + at + used, length - used});
        }
        if (f->made - before > f->block_limit) refuse(f, "a zstd block makes too much");
        at += taken;
    }
    if (f->made != size)
        kv_fail(reader, INVALID_PAYLOAD, "container-24", "a zstd frame makes %llu bytes, not %llu",
                (unsigned long long)f->made, (unsigned long long)size);
    if (bytes.size - at != (head & 4 ? 4u : 0u)) refuse(f, "it does not end where its tensor does");
    if (head & 4 && kv_little(bytes.data + at, 4) != (kv_xxh64(content, (size_t)size) & 0xffffffff))
        kv_fail(reader, INVALID_PAYLOAD, "container-33", "the checksum of a zstd frame does not agree");
}
