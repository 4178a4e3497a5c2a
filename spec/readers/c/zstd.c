/* Zstandard frames (RFC 8878), without dictionaries, and with nothing that RFC 8878 does not allow. */
#define MAX_BLOCK (128u << 10)
typedef struct {
  u16 baseline;
  u8 symbol, bits;
} cell;

typedef struct {
  cell cells[512];
  int accuracy; /* -1: no table yet */
} table;

typedef struct {
  kv_reader *r;
  u8 *content;
  u64 size, made, block_limit, window, offsets[3];
  table tables[3]; /* of literal lengths, offsets and match lengths */
  cell huffman[1 << 11];
  int huffman_bits; /* 0: no tree yet */
  u8 literals[MAX_BLOCK];
  u32 literal_count;
} frame;
/* Bits that are read from the last one backward; `left` is below 0 if more were read than there are. */
typedef struct {
  const u8 *data;
  int64_t left;
} backward;

static void require(frame *f, bool ok, const char *why) { need(f->r, ok, "container-21", "zstd: %s", why); }
static void require_room(frame *f, u64 n) { need(f->r, n <= f->size - f->made, "container-24", "too long"); }

static backward open_bits(frame *f, kv_bytes bytes) {
  u8 last = bytes.size ? bytes.data[bytes.size - 1] : 0;
  require(f, last, "a stream of bits does not end with its mark");
  return (backward){bytes.data, (int64_t)(bytes.size - 1) * 8 + highest(last)};
}
/* Reads the previous `count` bits. Missing bits are read as zeros. */
static u64 peek(const backward *b, int count) {
  if (b->left >= count) return get_bits(b->data, b->left - count, count);
  return b->left > 0 ? get_bits(b->data, 0, (int)b->left) << (count - b->left) : 0;
}

static u64 take_bits(backward *b, int count) {
  u64 value = peek(b, count);
  b->left -= count;
  return value;
}

static void build_table(frame *f, table *t, const signed short *chances, int symbols, int accuracy) {
  u32 size = 1u << accuracy, high = size, step = (size >> 1) + (size >> 3) + 3, at = 0;
  u16 next[256];
  for (int s = 0; s < symbols; s++) {
    next[s] = chances[s] < 0 ? 1 : chances[s];
    if (chances[s] < 0) t->cells[--high].symbol = s;
  }
  for (int s = 0; s < symbols; s++)
    for (int i = 0; i < chances[s]; i++) {
      t->cells[at].symbol = s;
      do at = (at + step) & (size - 1);
      while (at >= high);
    }
  require(f, !at, "a table of FSE does not fill its places");
  for (cell *c = t->cells; c < t->cells + size; c++) {
    u32 n = next[c->symbol]++;
    c->bits = accuracy - highest(n);
    c->baseline = (n << c->bits) - size;
  }
  t->accuracy = accuracy;
}

static u32 forward(frame *f, kv_bytes bytes, u64 *at, int count) {
  require(f, *at + count <= bytes.size * 8, "a table of FSE is cut short");
  *at += count;
  return (u32)get_bits(bytes.data, *at - count, count);
}
/* Reads the description of a table and returns its size in bytes. */
static u64 read_table(frame *f, kv_bytes bytes, table *t, int max_accuracy, int max_symbols) {
  signed short chances[256] = {0};
  u64 at = 0;
  int accuracy = (int)forward(f, bytes, &at, 4) + 5, symbols = 0, left = 1 << accuracy;
  require(f, accuracy <= max_accuracy, "the accuracy of a table is too large");
  while (left > 0) {
    int count = highest(left + 1) + 1;
    u32 mask = (1u << (count - 1)) - 1, threshold = (1u << count) - 2 - left;
    u32 value = forward(f, bytes, &at, count - 1);
    if (value >= threshold) {
      value |= forward(f, bytes, &at, 1) << (count - 1);
      if (value > mask) value -= threshold;
    }
    require(f, symbols < max_symbols, "a table has too many symbols");
    chances[symbols] = (signed short)(value - 1);
    left -= chances[symbols] < 0 ? 1 : chances[symbols];
    for (u32 zeros = chances[symbols++] ? 0 : 3; zeros == 3;) {
      zeros = forward(f, bytes, &at, 2);
      symbols += zeros;
      require(f, symbols <= max_symbols, "a table has too many symbols");
    }
  }
  require(f, !left, "the chances of a table have another sum");
  build_table(f, t, chances, symbols, accuracy);
  return (at + 7) / 8;
}
/* Reads the weights of a Huffman tree that are coded by FSE with two alternating states. */
static int coded_weights(frame *f, kv_bytes bytes, u8 *weights) {
  table t;
  u64 used = read_table(f, bytes, &t, 6, 256);
  backward b = open_bits(f, (kv_bytes){bytes.data + used, bytes.size - used});
  u64 states[2] = {take_bits(&b, t.accuracy), 0};
  states[1] = take_bits(&b, t.accuracy);
  require(f, b.left >= 0, "the weights of a Huffman tree are cut short");
  int count = 0;
  for (int turn = 0; b.left >= 0; turn ^= 1) {
    require(f, count <= 253, "a Huffman tree has too many weights");
    cell c = t.cells[states[turn]];
    weights[count++] = c.symbol;
    states[turn] = c.baseline + take_bits(&b, c.bits);
    if (b.left < 0) weights[count++] = t.cells[states[turn ^ 1]].symbol;
  }
  return count;
}

static u64 read_tree(frame *f, kv_bytes bytes) {
  u8 weights[256] = {0};
  int head = bytes.size ? bytes.data[0] : 0, count = head - 127;
  u64 used = head < 128 ? head : (count + 1) / 2;
  require(f, used < bytes.size, "a Huffman tree is cut short");
  if (head < 128) count = coded_weights(f, (kv_bytes){bytes.data + 1, used}, weights);
  for (int i = 0; head >= 128 && i < count; i++) weights[i] = bytes.data[1 + i / 2] >> (i % 2 ? 0 : 4) & 15;
  u32 sum = 0, at = 0, deepest = 0;
  for (int i = 0; i < count; i++) {
    require(f, weights[i] <= 11, "a Huffman tree is too deep");
    sum += weights[i] ? 1u << (weights[i] - 1) : 0;
  }
  int depth = highest(sum) + 1;
  require(f, sum && depth <= 11, "a Huffman tree is too deep");
  u32 rest = (1u << depth) - sum;
  require(f, !(rest & (rest - 1)), "the weights of a Huffman tree have no last one");
  weights[count++] = highest(rest) + 1;
  for (int weight = 1; weight <= depth; weight++)
    for (int s = 0; s < count; s++) {
      u32 end = weights[s] == weight ? at + (1u << (weight - 1)) : at;
      deepest += weight == 1 && end > at;
      for (; at < end; at++) f->huffman[at] = (cell){0, s, depth + 1 - weight};
    }
  require(f, deepest >= 2, "a Huffman tree has no codes of its depth");
  f->huffman_bits = depth;
  return used + 1;
}

static void read_stream(frame *f, kv_bytes bytes, u8 *out, u32 count) {
  backward b = open_bits(f, bytes);
  for (u32 i = 0; i < count && b.left >= 0; i++) {
    cell c = f->huffman[peek(&b, f->huffman_bits)];
    out[i] = c.symbol;
    b.left -= c.bits;
  }
  require(f, !b.left, "literals are cut short or leave bits");
}
/* Reads the literals section and returns its size in bytes. */
static u64 read_literals(frame *f, kv_bytes block) {
  static const u8 heads[2][4] = {{1, 2, 1, 3}, {3, 3, 4, 5}}, widths[] = {10, 10, 14, 18};
  int kind = block.data[0] & 3, format = block.data[0] >> 2 & 3, width = widths[format];
  u64 head = heads[kind > 1][format];
  require(f, block.size >= head, "literals are cut short");
  u64 number = little(block.data, (int)head), left = block.size - head;
  const u8 *from = block.data + head;
  f->literal_count = kind < 2 ? number >> (format & 1 ? 4 : 3) : number >> 4 & ((1u << width) - 1);
  u64 size = kind == 0 ? f->literal_count : kind == 1 ? 1 : number >> (4 + width) & ((1u << width) - 1);
  require(f, f->literal_count <= f->block_limit && size <= left, "literals are cut short");
  if (kind == 0) memcpy(f->literals, from, size);
  if (kind == 1) memset(f->literals, *from, f->literal_count);
  if (kind < 2) return head + size;
  u64 tree = kind == 2 ? read_tree(f, (kv_bytes){from, size}) : 0;
  require(f, f->huffman_bits, "there is no Huffman tree");
  kv_bytes bytes = {from + tree, size - tree};
  if (format == 0) read_stream(f, bytes, f->literals, f->literal_count);
  if (format == 0) return head + size;
  require(f, bytes.size >= 6 && f->literal_count >= 6, "four streams of literals are cut short");
  kv_bytes rest = {bytes.data + 6, bytes.size - 6};
  u32 each = (f->literal_count + 3) / 4, done = 0;
  for (int i = 0; i < 4; i++, done += each) {
    u64 length = i < 3 ? little(bytes.data + 2 * i, 2) : rest.size;
    require(f, length <= rest.size && done <= f->literal_count, "literals are cut short");
    read_stream(f, cut(&rest, length), f->literals + done, i < 3 ? each : f->literal_count - done);
  }
  return head + size;
}
/* What each code of lengths (0), offsets (1) and matches (2) has, as characters from '0' on: the bits after
 * its symbol, and how likely it is in the table that a frame need not give, where / is -1. */
static const char extra_bits[3][54] = {
    "00000000000000001111223346789:;<=>?@", "", "0000000000000000000000000000000011112233445789:;<=>?@"};
static const char likely[3][54] = {"43222222222221112222222223211111////", "111111222111111111111111/////",
    "1432222221111111111111111111111111111111111111///////"};

static u64 read_mode(frame *f, int which, int mode, kv_bytes bytes) {
  static const int accuracies[] = {9, 8, 9}, defaults[] = {6, 5, 6}, symbols[] = {36, 32, 53};
  table *t = &f->tables[which];
  signed short chances[54];
  int count = strlen(likely[which]);
  for (int i = 0; i < count; i++) chances[i] = likely[which][i] - '0';
  if (mode == 0) build_table(f, t, chances, count, defaults[which]);
  if (mode == 2) return read_table(f, bytes, t, accuracies[which], symbols[which]);
  require(f, mode != 1 || (bytes.size && bytes.data[0] < symbols[which]), "a code does not exist");
  if (mode == 1) *t = (table){.cells = {{0, bytes.data[0], 0}}};
  require(f, t->accuracy >= 0, "there is no table to repeat");
  return mode == 1;
}

static void put(frame *f, const u8 *from, u64 count) {
  require_room(f, count);
  if (count) memcpy(f->content + f->made, from, count);
  f->made += count;
}
/* The value of a code of lengths or matches: those of the codes before cover all numbers below. */
static u64 length_of(backward *b, int which, u32 code) {
  u64 value = which == 2 ? 3 : 0;
  for (u32 i = 0; i < code; i++) value += (u64)1 << (extra_bits[which][i] - '0');
  return value + take_bits(b, extra_bits[which][code] - '0');
}

static void read_sequences(frame *f, kv_bytes bytes) {
  u32 count = bytes.size ? bytes.data[0] : 0, literal = 0;
  u64 at = count < 128 ? 1 : count < 255 ? 2 : 3;
  require(f, bytes.size >= at, "sequences are cut short");
  if (at == 2) count = (count - 128) << 8 | bytes.data[1];
  if (at == 3) count = (u32)little(bytes.data + 1, 2) + 0x7f00;
  require(f, count ? at < bytes.size && !(bytes.data[at] & 3) : at == bytes.size, "modes are malformed");
  backward b = {NULL, 0};
  u64 states[3];
  if (count) {
    int modes = bytes.data[at++];
    for (int i = 0; i < 3; i++)
      at += read_mode(f, i, modes >> (6 - 2 * i) & 3, (kv_bytes){bytes.data + at, bytes.size - at});
    b = open_bits(f, (kv_bytes){bytes.data + at, bytes.size - at});
    for (int i = 0; i < 3; i++) states[i] = take_bits(&b, f->tables[i].accuracy);
  }
  while (count--) {
    cell cells[3];
    for (int i = 0; i < 3; i++) cells[i] = f->tables[i].cells[states[i]];
    u64 value = ((u64)1 << cells[1].symbol) + take_bits(&b, cells[1].symbol);
    u64 match = length_of(&b, 2, cells[2].symbol), length = length_of(&b, 0, cells[0].symbol);
    for (int i = 0; count && i < 3; i++) {
      int which = i ? 3 - i : 0; /* matches before offsets */
      states[which] = cells[which].baseline + take_bits(&b, cells[which].bits);
    }
    require(f, b.left >= 0 && length <= f->literal_count - literal, "sequences are cut short");
    put(f, f->literals + literal, length);
    literal += (u32)length;
    /* The offset of a match becomes the last of three that may be named again. */
    u64 *last = f->offsets, index = value > 3 ? 3 : value - (length > 0);
    u64 offset = value > 3 ? value - 3 : index == 3 ? last[0] - 1 : last[index];
    if (index > 1) last[2] = last[1];
    if (index > 0) last[1] = last[0];
    last[0] = offset;
    require(f, offset && offset <= f->made && offset <= f->window, "a match begins before the zstd window");
    require_room(f, match);
    for (u64 i = 0; i < match; i++, f->made++) f->content[f->made] = f->content[f->made - offset];
  }
  require(f, !b.left, "sequences leave bits");
  put(f, f->literals + literal, f->literal_count - literal);
}
/* Reads the header of a frame and returns its size in bytes. */
static u64 read_frame_header(frame *f, kv_bytes bytes) {
  static const u8 id_bytes[] = {0, 1, 2, 4}, size_bytes[] = {0, 2, 4, 8};
  require(f, bytes.size >= 5 && little(bytes.data, 4) == 0xfd2fb528, "it does not begin as one");
  int head = bytes.data[4], single = head >> 5 & 1;
  int ids = id_bytes[head & 3], sizes = head >> 6 ? size_bytes[head >> 6] : single, at = 6 - single;
  require(f, !(head & 8) && bytes.size >= (u64)(at + ids + sizes), "its header is malformed");
  need(f->r, !little(bytes.data + at, ids), "container-25", "a zstd frame needs a dictionary");
  need(f->r, sizes, "container-22", "a zstd frame does not give its content size");
  u64 given = little(bytes.data + at + ids, sizes) + (sizes == 2 ? 256 : 0);
  need(f->r, given == f->size, "container-23", "a zstd frame has %llu bytes of content", given);
  u64 base = (u64)1 << (10 + (bytes.data[5] >> 3));
  f->window = single ? f->size : base + base / 8 * (bytes.data[5] & 7u);
  need(f->r, f->window <= 8388608, "container-26", "a zstd window has more than 8388608 bytes");
  f->block_limit = f->window < MAX_BLOCK ? f->window : MAX_BLOCK;
  return at + ids + sizes;
}
/* Decompresses a tensor, whose content has `size` bytes. */
static void unzstd(kv_reader *r, kv_bytes bytes, u8 *content, u64 size, bool checksum) {
  frame *f = take(r, 1, sizeof *f);
  *f = (frame){.r = r, .content = content, .size = size, .offsets = {1, 4, 8}};
  for (int i = 0; i < 3; i++) f->tables[i].accuracy = -1;
  u64 at = read_frame_header(f, bytes);
  bool last = false, summed = bytes.data[4] & 4;
  need(r, summed || !checksum, "container-65", "a zstd frame has no checksum");
  while (!last) {
    require(f, bytes.size - at >= 3, "it is cut short");
    u32 head = (u32)little(bytes.data + at, 3), kind = head >> 1 & 3, length = head >> 3;
    u64 before = f->made, taken = kind == 1 ? 1 : length;
    const u8 *from = bytes.data + (at += 3);
    last = head & 1;
    if (kind < 2) require_room(f, length);
    bool right = kind < 3 && length <= f->block_limit && bytes.size - at >= taken && (kind < 2 || length > 1);
    require(f, right, "a zstd block is malformed");
    if (kind == 0) put(f, from, length);
    if (kind == 1 && length) memset(f->content + f->made, *from, length);
    if (kind == 1) f->made += length;
    if (kind == 2) {
      u64 used = read_literals(f, (kv_bytes){from, length});
      read_sequences(f, (kv_bytes){from + used, length - used});
    }
    require(f, f->made - before <= f->block_limit, "a zstd block makes too much");
    at += taken;
  }
  need(r, f->made == size, "container-24", "a zstd frame makes %llu bytes, not %llu", f->made, size);
  require(f, bytes.size - at == (summed ? 4 : 0), "it does not end where its tensor does");
  bool agrees = !summed || little(bytes.data + at, 4) == (xxh64(content, size) & 0xffffffff);
  need(r, agrees, "container-33", "the checksum of a zstd frame does not agree");
}
