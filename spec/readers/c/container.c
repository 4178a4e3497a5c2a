/* The file: its JSON header, its tensors, and its digests (container.md). */
#define BEGINNING "{\"__metadata__\":{\"format\":\"kvpack\",\"kvpack\":\""

typedef struct {
  kv_reader *r;
  kv_bytes bytes; /* up to the end of the JSON header */
  u64 at;
} json;

static u64 aligned(u64 size, u64 unit) { return (size + unit - 1) / unit * unit; }
/* Reads a decimal number of at most `most` digits, without leading zeros. */
static u64 read_decimal(json *j, u64 most) {
  const u8 *first = j->bytes.data + j->at;
  u64 number = 0, count = 0, left = j->bytes.size - j->at;
  for (; count < left && count <= most && first[count] >= '0' && first[count] <= '9'; count++)
    number = number * 10 + first[count] - '0';
  bool right = count && count <= most && (count == 1 || *first != '0');
  need(j->r, right, "container-5", "a number has another form");
  j->at += count;
  return number;
}

static void expect(json *j, const char *format, ...) {
  char text[160];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  need(j->r, begins(&j->bytes.data[j->at], j->bytes.size - j->at, text), "container-5", "a wrong byte");
  j->at += strlen(text);
}
/* Reads the part of the JSON header that does not depend on kvpack.header. */
static void open_header(kv_file *f, json *j) {
  kv_reader *r = f->r;
  kv_bytes bytes = f->bytes;
  bool right = bytes.size >= 8 && begins(bytes.data + 8, bytes.size - 8, BEGINNING);
  need(r, right, "container-5:magic", "the file does not begin as a kvpack file does");
  *j = (json){r, bytes, 8 + strlen(BEGINNING)};
  need(r, j->at < bytes.size, "container-4", "the file ends within the major number");
  u64 major = read_decimal(j, 9);
  need(r, major, "container-5", "the major number is 0");
  need(r, j->at < bytes.size, "container-4", "the file ends within the major number");
  right = bytes.data[j->at] == ' ' || (bytes.data[j->at] == '"' && major > 1);
  need(r, right, "container-5", "the major number has another form");
  need(r, major == 1, "container-6", "a later version, %llu, wrote the file", major);
  u64 length = little(bytes.data, 8);
  need(r, length <= 16777216, "container-29", "the JSON header has %llu bytes", length);
  need(r, 8 + length <= bytes.size, "container-4", "the file ends within its JSON header");
  need(r, (8 + length) % 4096 == 0, "container-3", "8 + L is not a multiple of 4096");
  f->data = j->bytes.size = 8 + length;
  expect(j, " ");
  u8 digest[16] = {0};
  for (int i = 0; i < 32; i++, j->at++) {
    u8 c = bytes.data[j->at], digit = c <= '9' ? c - '0' : c - 'a' + 10;
    need(r, digit < 16 && (c <= '9' || c >= 'a'), "container-5", "a digest has another form");
    digest[i / 2] = digest[i / 2] << 4 | digit;
  }
  expect(j, "\"},\"kvpack.header\":{\"dtype\":\"U8\",\"shape\":[");
  u64 size = read_decimal(j, 7);
  expect(j, "],\"data_offsets\":[0,%llu]}", size);
  need(r, size <= 8388608, "container-29", "kvpack.header has %llu bytes", size);
  need(r, bytes.size - f->data >= size, "container-4", "the file ends within kvpack.header");
  f->header = (kv_bytes){bytes.data + f->data, size};
  need(r, has_xxh3(f->header, digest), "container-20", "kvpack.header does not have its digest");
  look_for_new(r, f->header);
}

static void expect_tensor(json *j, const char *name, const kv_tensor *t, u64 from, u64 to) {
  bool bytes = !t || t->zstd;
  expect(j, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", name, dtype_names[bytes ? U8 : t->dtype]);
  for (u32 i = 0; i < (bytes ? 1 : t->rank); i++)
    expect(j, i ? ",%llu" : "%llu", bytes ? to - from : t->shape[i]);
  expect(j, "],\"data_offsets\":[%llu,%llu]}", from, to);
}
/* Computes the offsets of the tensors, and compares the rest of the JSON header with them. */
static void check_json(kv_file *f, json *j) {
  u64 offset = f->header.size, pads = 0, left = f->bytes.size - f->data;
  for (kv_tensor *t = f->tensors; t < f->tensors + f->tensor_count; t++) {
    char name[40];
    t->offset = aligned(offset, 64);
    snprintf(name, sizeof name, "kvpack.pad.%llu", pads);
    pads += t->offset > offset;
    if (t->offset > offset) expect_tensor(j, name, NULL, offset, t->offset);
    offset = plus(t->offset, t->stored);
    need(f->r, offset < (u64)1 << 60, "container-29", "the file is too large");
    expect_tensor(j, t->name, t, t->offset, offset);
  }
  expect(j, "}");
  need(f->r, aligned(j->at, 4096) == f->data, "container-5", "the JSON header has too many spaces");
  while (j->at < f->data) expect(j, " ");
  need(f->r, left == offset, "container-4", "tensors take %llu bytes, and %llu follow", offset, left);
}

kv_file *kv_open(kv_reader *r, kv_bytes bytes) {
  kv_file *f = take(r, 1, sizeof *f);
  json j;
  u64 decoded = 0;
  *f = (kv_file){.r = r, .bytes = bytes};
  open_header(f, &j);
  read_header(f);
  check_json(f, &j);
  for (u64 i = 0; i < f->tensor_count; i++) decoded = plus(decoded, f->tensors[i].bytes);
  need(r, decoded <= r->limit, "container-29", "the tensors take %llu bytes", decoded);
  return f;
}
/* Checks all bytes of a file and all rules of its codecs, and decompresses. A page has no data section. */
void kv_check(kv_file *f) {
  kv_reader *r = f->r;
  const u8 *data = f->bytes.data + f->data;
  u64 end = f->header.size;
  for (kv_tensor *t = f->tensors; f->data && t < f->tensors + f->tensor_count; t++) {
    for (; end < t->offset; end++) need(r, !data[end], "container-19", "the pad before %s is not 0", t->name);
    end = t->offset + t->stored;
    t->data = data + t->offset;
    kv_bytes stored = {t->data, t->stored};
    need(r, has_xxh3(stored, t->digest), "container-20", "%s does not have its digest", t->name);
    if (!t->zstd) continue;
    u8 *content = take(r, t->bytes, 1);
    kv_block *mark = r->blocks;
    unzstd(r, stored, content, t->bytes, f->checksums);
    release(r, mark);
    t->data = content;
  }
  for (kv_tensor *t = f->tensors; t < f->tensors + f->tensor_count; t++)
    need(f->r, t->any || all_finite(t), "front-13", "%s has a number that is not finite", t->name);
  for (u32 i = 0; i < f->side_count; i++) {
    check_codec(f, f->sides[i]);
    check_sidecars(f, f->sides[i]);
  }
  if (f->basis) check_basis(f);
}
