/* Refusals, memory, numbers and bits. */
#define PI 3.14159265358979323846

static const char *const dtype_names[] = {"U8", "U16", "F16", "BF16", "F32"};
static const u8 dtype_bytes[] = {1, 2, 2, 2, 4};

static u64 times(u64 a, u64 b) { return b && a > UINT64_MAX / b ? UINT64_MAX : a * b; }
static u64 plus(u64 a, u64 b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

static u64 little(const u8 *bytes, int count) {
  u64 number = 0;
  while (count--) number = number << 8 | bytes[count];
  return number;
}

static u64 big(const u8 *bytes, int count) {
  u64 number = 0;
  for (int i = 0; i < count; i++) number = number << 8 | bytes[i];
  return number;
}
/* Returns at most 64 bits from bit `at` on. The first bit is the lowest. */
static u64 get_bits(const u8 *data, u64 at, int count) {
  u64 value = 0;
  for (u64 i = at / 8; 8 * i < at + count; i++)
    value |= 8 * i < at ? (u64)data[i] >> (at - 8 * i) : (u64)data[i] << (8 * i - at);
  return count ? value & UINT64_MAX >> (64 - count) : 0;
}
/* Returns the position of the highest set bit, or -1. */
static int highest(u64 number) {
  int bit = -1;
  for (; number; number >>= 1) bit++;
  return bit;
}

static void put_big(u8 *to, u64 number, int count) {
  for (; count; number >>= 8) to[--count] = (u8)number;
}

static kv_bytes text_of(const char *words) { return (kv_bytes){(const u8 *)words, strlen(words)}; }
static bool is(kv_bytes b, const char *text) {
  return b.size == strlen(text) && !memcmp(b.data, text, b.size);
}
/* Returns whether bytes begin with a text. */
static bool begins(const u8 *data, u64 size, const char *text) {
  return size >= strlen(text) && !memcmp(data, text, strlen(text));
}
/* The number of a text among words with bars between them, which end with a space or the text; or -1. */
static int word_of(kv_bytes text, const char *words) {
  for (int i = 0; *words && *words != ' '; i++) {
    u64 size = strcspn(words, "| ");
    if (size == text.size && !memcmp(words, text.data, size)) return i;
    words += size + (words[size] == '|');
  }
  return -1;
}
/* Removes the first `size` bytes from a byte string of at least that size, and returns them. */
static kv_bytes cut(kv_bytes *rest, u64 size) {
  kv_bytes front = {rest->data, size};
  rest->data += size;
  rest->size -= size;
  return front;
}
/* Compares bytes. For UTF-8, the order is that of code points. */
static int compare(kv_bytes a, kv_bytes b) {
  u64 common = a.size < b.size ? a.size : b.size;
  int order = common ? memcmp(a.data, b.data, common) : 0;
  return order ? order : (a.size > b.size) - (a.size < b.size);
}
/* Returns whether bytes are valid UTF-8, with shortest forms and without surrogates. */
static bool is_utf8(kv_bytes text) {
  static const u32 least[] = {0, 0x80, 0x800, 0x10000};
  for (u64 i = 0; i < text.size;) {
    u32 lead = text.data[i++], more = lead < 0x80 ? 0 : lead < 0xe0 ? 1 : lead < 0xf0 ? 2 : 3;
    u32 point = more ? lead & (0x3f >> more) : lead;
    if ((more && lead < 0xc0) || lead >= 0xf8 || text.size - i < more) return false;
    for (u32 k = 0; k < more; k++, i++) {
      if ((text.data[i] & 0xc0) != 0x80) return false;
      point = point << 6 | (text.data[i] & 0x3f);
    }
    if (point < least[more] || point > 0x10ffff || (point >= 0xd800 && point < 0xe000)) return false;
  }
  return true;
}

static float as_float(u32 bits) {
  return (union {
    u32 bits;
    float number;
  }){bits}
      .number;
}

static float from_half(u16 bits) {
  u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (!exponent) return copysignf((float)fraction * 0x1p-24f, as_float(sign));
  return as_float(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}
/* Returns the nearest binary16 number, ties to even. */
static float round_half(float number) {
  int exponent;
  if (!(fabsf(number) < 65520)) return number * INFINITY;
  frexpf(number, &exponent);
  float unit = ldexpf(1, exponent < -13 ? -24 : exponent - 11);
  return rintf(number / unit) * unit;
}

static float number_at(kv_dtype dtype, const u8 *data, u64 index) {
  u32 bits = (u32)little(data + index * dtype_bytes[dtype], dtype_bytes[dtype]);
  if (dtype == F16) return from_half((u16)bits);
  return dtype == BF16 ? as_float(bits << 16) : dtype == F32 ? as_float(bits) : (float)bits;
}
/* The classes of rules (rules.md) but InvalidHeader; a colon begins the word of one of several classes. */
static const char *const classes[][2] = {{"NotKvpack", "container-5:magic|row-1:magic|store-5:magic"},
    {"UnsupportedVersion", "container-6|container-7|container-32|row-1:version|store-5:version"},
    {"UnknownCodec", "container-12"}, {"MissingBasis", "klt-5|transform-5|side-cars-16"},
    {"Truncated", "container-4|row-1:size|row-2:cut"},
    {"DigestMismatch", "container-20|row-4|store-3|store-31"}, {"LimitExceeded", "container-29|store-7"},
    {"Undecryptable", "store-5"}, {"OutOfMemory", "front-15"},
    {"InvalidPayload",
        "front-2|front-3|front-4|front-13|container-19|container-21|container-22|container-23|"
        "container-24|container-25|container-26|container-33|container-65|side-cars-5|side-cars-6|"
        "side-cars-7|side-cars-8|side-cars-12|side-cars-13|basis-4|basis-14|basis-15|basis-23|"
        "klt-11|group-7|minifloat-6|minifloat-7|minifloat-8|octahedral-5|lossless-6|transform-8|"
        "transform-9|transform-10|transform-11|rans-1|rans-2|rans-3|rans-4"}};
/* Refuses input unless `right`. The description of a packed page has one rule for all errors (row.md). */
static void need(kv_reader *r, bool right, const char *rule, const char *format, ...) {
  if (right) return;
  va_list values;
  va_start(values, format);
  vsnprintf(r->message, sizeof r->message, format, values);
  va_end(values);
  if (r->page && strncmp(rule, "row-", 4) && strcmp(rule, "front-15")) rule = "row-3";
  r->kind = "InvalidHeader";
  for (u64 i = 0; i < sizeof classes / sizeof *classes; i++)
    if (word_of(text_of(rule), classes[i][1]) >= 0) r->kind = classes[i][0];
  snprintf(r->rule, sizeof r->rule, "%.*s", (int)strcspn(rule, ":"), rule);
  longjmp(r->refused, 1);
}
/* Returns zeroed memory for `count` elements. */
static void *take(kv_reader *r, u64 count, u64 size) {
  u64 bytes = plus(times(count, size), sizeof(kv_block) + 1);
  kv_block *block = bytes < SIZE_MAX / 2 ? calloc(1, bytes) : NULL;
  need(r, block != NULL, "front-15", "there is no memory for %llu bytes", bytes);
  block->next = r->blocks;
  r->blocks = block;
  return block->start;
}
/* Frees all blocks that were allocated after the block `mark`. */
static void release(kv_reader *r, kv_block *mark) {
  while (r->blocks != mark) {
    kv_block *next = r->blocks->next;
    free(r->blocks);
    r->blocks = next;
  }
}

void kv_free(kv_reader *r) { release(r, NULL); }
