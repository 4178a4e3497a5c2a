/* The program of the reader (spec/readers/README.md): a line for each file, and a line as its answer. */
#include "kvpack.c"

#define LIMIT ((u64)1 << 32)
#define MAX_FIELDS 64

static kv_bytes read_file(kv_reader *r, const char *path) {
  FILE *file = fopen(path, "rb");
  long size = -1;
  if (file && !fseek(file, 0, SEEK_END)) size = ftell(file);
  if (file) rewind(file);
  need(r, size >= 0 && (u64)size <= LIMIT, "container-29", "%s is no file, or one that is too large", path);
  u8 *data = take(r, (u64)size, 1);
  u64 found = fread(data, 1, (u64)size, file);
  fclose(file);
  return (kv_bytes){data, found};
}

static void write_values(kv_file *f, const char *path) {
  u64 count = 0, at = 0;
  for (u32 i = 0; i < f->side_count; i++) count = plus(count, kv_value_count(f->sides[i]));
  need(f->r, times(count, sizeof(float)) <= f->r->limit, "container-29", "there are %llu values", count);
  float *values = take(f->r, count, sizeof *values);
  for (u32 i = 0; i < f->side_count; at += kv_value_count(f->sides[i++]))
    kv_decode(f, f->sides[i], values + at);
  FILE *out = fopen(path, "wb");
  bool written = out != NULL;
  for (u64 i = 0; written && i < count; i++) {
    u32 bits;
    memcpy(&bits, &values[i], sizeof bits);
    for (int k = 0; k < 32; k += 8) written = putc(bits >> k & 255, out) != EOF && written;
  }
  written = out && !fclose(out) && written;
  need(f->r, written, "front-15", "%s cannot be written", path);
}

static void print_text(kv_bytes text) {
  putchar('"');
  for (u64 i = 0; i < text.size; i++)
    printf(strchr("\"\\\177", text.data[i]) || text.data[i] < 32 ? "\\u%04x" : "%c", text.data[i]);
  putchar('"');
}

static void print_digest(const char *before, kv_bytes data) {
  u8 digest[32];
  sha256(data, digest);
  printf("%s\"", before);
  for (int i = 0; i < 32; i++) printf("%02x", digest[i]);
  putchar('"');
}
/* The data of features NAME.0, NAME.1 and so on, joined; without data if there is not the first. */
static kv_bytes joined(kv_file *f, const char *name) {
  kv_bytes all = {NULL, 0};
  for (u32 i = 0;; i++) {
    char key[40];
    snprintf(key, sizeof key, "%s.%u", name, i);
    kv_bytes part = feature(f, key);
    if (!part.data) return all;
    u8 *data = take(f->r, all.size + part.size, 1);
    if (all.size) memcpy(data, all.data, all.size);
    if (part.size) memcpy(data + all.size, part.data, part.size);
    all = (kv_bytes){data, all.size + part.size};
  }
}
/* What ids do not determine, by the feature `inputs`, printed if `print`; its token ids, or false if it has
 * another form. */
static bool walk_inputs(kv_bytes data, bool print, kv_bytes *ids) {
  u64 count = data.size < 8 ? 0 : little(data.data, 8), at = 8 + 4 * count;
  if (data.size < 8 || count > (data.size - 8) / 4) return false;
  for (bool more = false; at < data.size; more = true) {
    if (data.size - at < 12) return false;
    u64 size = little(data.data + at + 8, 4);
    kv_bytes text = {data.data + at + 12, size};
    if (!size || size > data.size - at - 12 || !is_utf8(text)) return false;
    at += 12 + size;
    if (!print) continue;
    printf("%s[\"%llu\",", more ? "," : "", little(text.data - 12, 8));
    print_text(text);
    putchar(']');
  }
  *ids = (kv_bytes){data.data + 8, 4 * count};
  return true;
}
/* The token ids of all sequences; without data if the file has none. */
static kv_bytes token_ids(kv_file *f) {
  kv_bytes inputs = feature(f, "inputs"), tokens = joined(f, "token-ids"), rows = joined(f, "row-ids");
  kv_bytes ids = {NULL, 0};
  u64 length = f->end - f->start, sequences = f->fewest;
  if (!inputs.data && !tokens.data && !rows.data) return ids;
  walk_inputs(inputs, false, &ids);
  bool longer = tokens.size % 4 == 0 && tokens.size >= ids.size;
  if (longer && tokens.data && (!ids.size || !memcmp(tokens.data, ids.data, ids.size))) ids = tokens;
  u64 own = rows.size < 12 ? 0 : little(rows.data + 4, 8);
  bool right = !own || little(rows.data, 4) == sequences;
  if (!right || times(times(own, sequences), 4) != rows.size - 12) own = 0;
  u64 shared = ids.size / 4 < length ? ids.size / 4 : length,
      rest = own < length - shared ? own : length - shared;
  u8 *all = take(f->r, times(sequences, 4 * (shared + rest)), 1), *to = all;
  for (u64 s = 0; s < sequences; s++, to += 4 * (shared + rest)) {
    if (shared) memcpy(to, ids.data, 4 * shared);
    if (rest) memcpy(to + 4 * shared, rows.data + 12 + 4 * own * s, 4 * rest);
  }
  return (kv_bytes){all, to - all};
}
/* Metadata, printed if `print`; false if the data have another form. */
static bool walk_metadata(kv_bytes data, bool print) {
  static const char *const types[] = {"text", "integer", "number"};
  kv_bytes last = {NULL, 0};
  u64 at = 0, count = 0;
  for (; at < data.size; count++) {
    u64 length = data.data[at], left = data.size - at - 1;
    kv_bytes name = {data.data + at + 1, length};
    if (!length || left < length + 5 || count == 256) return false;
    if (!is_utf8(name) || (count && compare(last, name) >= 0)) return false;
    last = name;
    at += 2 + length;
    u8 type = data.data[at - 1];
    u64 size = type ? 8 : 4 + little(data.data + at, 4);
    if (type > 2 || size > 4100 || size > data.size - at) return false;
    kv_bytes text = {data.data + at + 4, size - 4};
    u64 number = type ? little(data.data + at, 8) : 0;
    if ((type == 2 && (number >> 52 & 2047) == 2047) || (type == 0 && !is_utf8(text))) return false;
    at += size;
    if (!print) continue;
    printf(count ? ",[" : "[");
    print_text(name);
    printf(",\"%s\",", types[type]);
    if (type == 0) print_text(text);
    if (type == 1) printf("\"%lld\"", (long long)number);
    if (type == 2) printf("\"%016llx\"", number);
    putchar(']');
  }
  return true;
}
/* What a file says beside its values, as JSON in the form of the manifest of vectors. */
static void print_facts(kv_file *f, kv_bytes ids) {
  kv_bytes inputs = feature(f, "inputs"), metadata = feature(f, "metadata"), shared;
  kv_bytes offsets = feature(f, "position-offsets"), hidden = feature(f, "hidden-tokens");
  printf("ok\t{\"starts\":[");
  for (u32 l = 0; l < f->layer_count; l++) printf("%s%llu", l ? "," : "", f->layers[l].start);
  putchar(']');
  for (u64 at = 0; at < offsets.size; at += 8)
    printf("%s%lld", at ? "," : ",\"offsets\":[", (long long)little(offsets.data + at, 8));
  if (offsets.size) putchar(']');
  for (const u8 *at = hidden.data; at < hidden.data + hidden.size; at += 20) {
    printf(at > hidden.data ? "," : ",\"hidden\":[");
    printf("[%llu,%llu,%llu]", little(at, 4), little(at + 4, 8), little(at + 12, 8));
  }
  if (hidden.size) putchar(']');
  for (u32 i = 0; i < f->state_count; i++) {
    printf("%s\"%s\":", i ? "," : ",\"states\":{", f->states[i].tensor->name);
    print_digest("", (kv_bytes){f->states[i].tensor->data, f->states[i].tensor->bytes});
  }
  if (f->state_count) putchar('}');
  if (metadata.data) {
    printf(",\"metadata_entries\":[");
    if (walk_metadata(metadata, false)) walk_metadata(metadata, true);
    putchar(']');
  }
  if (inputs.data) {
    bool right = walk_inputs(inputs, false, &shared);
    printf(",\"undetermined\":%s", right ? "[" : "null");
    if (right) walk_inputs(inputs, true, &shared);
    if (right) putchar(']');
  }
  if (ids.data) print_digest(",\"token_ids_sha256\":", ids);
  printf("}\n");
}
/* The bytes of hexadecimal digits. */
static kv_bytes unhex(kv_reader *r, const char *text) {
  u64 size = strlen(text) / 2;
  u8 *data = take(r, size, 1);
  for (u64 i = 0; i < size; i++) data[i] = (u8)strtoul((char[]){text[2 * i], text[2 * i + 1], 0}, NULL, 16);
  return (kv_bytes){data, size};
}
/* What is wanted of an entry, by fields NAME=VALUE: key, parent, start and tenant; secret.ID, and
 * identity.NAME. */
static kv_wanted wanted(kv_reader *r, char **fields, u64 count) {
  kv_wanted w = {.limit = LIMIT, .key = take(r, 32, 1)};
  kv_named *secrets = take(r, count, sizeof *secrets);
  kv_named *identity = take(r, count, sizeof *identity);
  w.secrets = secrets;
  for (char **field = fields; field < fields + count; field++) {
    char *value = strchr(*field, '=');
    if (!value) continue;
    *value++ = 0;
    const char *name = *field, *own = strchr(name, '.') ? strchr(name, '.') + 1 : name;
    if (!strcmp(name, "key")) w.key = unhex(r, value).data;
    if (!strcmp(name, "parent")) w.parent = unhex(r, value).data;
    if (!strcmp(name, "start")) w.start = strtoull(value, NULL, 10);
    if (!strcmp(name, "tenant")) w.tenant = text_of(value);
    if (!strcmp(name, "states")) w.states = true;
    if (!strncmp(name, "secret.", 7)) secrets[w.secret_count++] = (kv_named){text_of(own), unhex(r, value)};
    if (!strncmp(name, "identity.", 9)) identity[w.field_count++] = (kv_named){text_of(own), text_of(value)};
  }
  w.fields = w.field_count ? identity : NULL;
  return w;
}

static bool ends_with(const char *path, const char *end) {
  return strlen(path) >= strlen(end) && !strcmp(path + strlen(path) - strlen(end), end);
}
/* Read, check and decode the file of a line, write its values, and print what it says. */
static void accept(kv_reader *r, char *line) {
  char *fields[MAX_FIELDS] = {line, ""};
  u64 count = 1;
  while ((line = strchr(line, '\t')) && count < MAX_FIELDS) {
    *line++ = 0;
    fields[count++] = line;
  }
  kv_bytes bases[MAX_FIELDS], bytes = read_file(r, fields[0]);
  kv_file *f;
  if (ends_with(fields[0], ".entry")) {
    kv_wanted w = wanted(r, fields + 2, count > 2 ? count - 2 : 0);
    f = kv_open_entry(r, bytes, &w);
  } else {
    for (u64 i = 2; i < count; i++) bases[r->base_count++] = read_file(r, fields[i]);
    r->bases = bases;
    f = ends_with(fields[0], ".row") ? kv_open_page(r, bytes) : kv_open(r, bytes);
  }
  kv_check(f);
  write_values(f, fields[1]);
  print_facts(f, token_ids(f));
}

static void answer(char *line) {
  kv_reader reader = {.limit = LIMIT};
  if (!setjmp(reader.refused)) {
    accept(&reader, line);
  } else {
    printf("%s\t%s\t", reader.kind, reader.rule);
    for (char *c = reader.message; *c; c++)
      if (*c & 0x80) *c = '?';
    print_text(text_of(reader.message));
    putchar('\n');
  }
  fflush(stdout);
  kv_free(&reader);
}

int main(void) {
  static char line[1 << 20];
  while (fgets(line, sizeof line, stdin)) {
    line[strcspn(line, "\n")] = 0;
    answer(line);
  }
  return 0;
}
