/* Entries of stores (store.md). What is not damaged is Undecryptable, UnsupportedVersion or LimitExceeded. */
/* Writes LP of every part, one after the other. */
static kv_bytes prefixed(kv_reader *r, const kv_bytes *parts, u64 count) {
  u64 size = 0;
  for (u64 i = 0; i < count; i++) size += 8 + parts[i].size;
  u8 *data = take(r, size, 1), *to = data;
  for (u64 i = 0; i < count; i++) {
    for (int k = 0; k < 8; k++) *to++ = (u8)(parts[i].size >> 8 * k);
    if (parts[i].size) memcpy(to, parts[i].data, parts[i].size);
    to += parts[i].size;
  }
  return (kv_bytes){data, size};
}

static kv_bytes field_of(const kv_wanted *w, const char *name) {
  for (u64 i = 0; i < w->field_count; i++)
    if (is(w->fields[i].name, name)) return w->fields[i].value;
  return (kv_bytes){NULL, 0};
}

static const char *const names[] = {
    "model", "recipe", "weights", "adapter", "rope", "dtype", "tenant", "config", "extra"};

void kv_root_key(kv_reader *r, const kv_wanted *w, u8 key[32]) {
  kv_bytes parts[20] = {text_of("format"), text_of("1")};
  for (int i = 0; i < 9; i++) {
    parts[2 * i + 2] = text_of(names[i]);
    parts[2 * i + 3] = i == 6 ? w->tenant : field_of(w, names[i]);
  }
  sha256(prefixed(r, parts, 20), key);
}
/* Returns the kvpack file in an entry that may be encrypted. */
static kv_bytes decrypted(kv_reader *r, kv_bytes entry, const kv_wanted *w) {
  u64 first = 17, digits = first;
  bool right = begins(entry.data, entry.size, "kvpack-encrypted ");
  while (right && digits < entry.size && entry.data[digits] >= '0' && entry.data[digits] <= '9') digits++;
  right = right && digits > first && digits < entry.size && entry.data[first] != '0';
  right = right && entry.data[digits] == '\n';
  need(r, right || !w->secret_count, "store-5:magic", "the entry is not encrypted");
  if (!right) return entry;
  need(r, digits == first + 1 && entry.data[first] == '1', "store-5:version", "it is of a later version");
  u64 nonce = entry.size > 19 ? 20 + entry.data[19] : 20;
  need(r, entry.size >= nonce + 12 + 16 + 16, "store-31", "the entry is too short for its parts");
  const u8 *tag = entry.data + entry.size - 32, *data = entry.data + nonce + 12;
  kv_bytes id = {entry.data + 20, nonce - 20}, head = {entry.data, nonce}, sealed = {data, tag - data};
  right = has_xxh3((kv_bytes){entry.data, entry.size - 16}, tag + 16);
  need(r, right, "store-31", "the entry does not have its digest");
  const kv_named *secret = w->secrets, *end = secret + w->secret_count;
  while (secret < end && compare(secret->name, id)) secret++;
  need(r, secret < end, "store-5", "the encryption key of the entry is not available");
  kv_bytes associated = prefixed(r, (kv_bytes[]){head, {w->key, 32}, w->tenant}, 3);
  u8 *clear = take(r, sealed.size, 1);
  right = decrypt(secret->value, entry.data + nonce, associated, sealed, tag, clear);
  need(r, right, "store-5", "the tag of the entry does not agree");
  return (kv_bytes){clear, sealed.size};
}
/* Checks the identity and the start in the header, if the caller has passed them. */
static void check_identity(kv_file *f, const kv_wanted *w, const char *rule) {
  u64 known = 0;
  for (int i = 0; w->fields && i < 9; i++) {
    kv_bytes found = i == 1 ? f->recipe : member(f->model, i ? names[i] : "name");
    known += i != 1 && i != 6 && found.size;
    need(
        f->r, i == 6 || !compare(field_of(w, names[i]), found), rule, "the entry is of another %s", names[i]);
  }
  need(f->r, !w->fields || known == f->model->number, rule, "the entry's model has other fields");
  need(f->r, !w->fields || f->start == w->start, rule, "the entry starts at %llu", f->start);
}

static void check_payload(kv_file *f, const u8 *digest, const char *rule) {
  u64 from = f->tensor_count ? f->data + f->tensors[0].offset : f->bytes.size;
  kv_bytes payload = {f->bytes.data + from, f->bytes.size - from};
  need(f->r, has_xxh3(payload, digest), "store-3", "the payload does not have its digest");
  for (u64 i = 0; i < f->tensor_count; i++)
    need(f->r, !f->tensors[i].zstd, rule, "the tensor %s of the entry has a filter", f->tensors[i].name);
}

static void check_chunk(kv_file *f, const kv_wanted *w) {
  kv_reader *r = f->r;
  kv_bytes record = feature(f, "prefix-store-2");
  u64 inputs = record.size > 80 ? record.data[80] : 0, first = 81 + inputs;
  bool right = record.size >= first && inputs <= 64 && (record.size - first) % 4 == 0;
  need(r, right, "store-2", "the file is not the entry of a chunk");
  kv_bytes ids = {record.data + first, record.size - first}, parent = {record.data + 32, 32};
  u8 own[32];
  sha256(prefixed(r, (kv_bytes[]){parent, ids, {record.data + 81, inputs}}, inputs ? 3 : 2), own);
  need(
      r, !memcmp(record.data, w->key, 32) && !memcmp(own, w->key, 32), "store-2", "it has another entry key");
  need(r, !w->parent || !memcmp(parent.data, w->parent, 32), "store-2", "the entry has another parent");
  check_identity(f, w, "store-2");
  for (u32 i = 0; i < f->side_count; i++) {
    const kv_side *s = f->sides[i];
    right = s->batch == 1 && !s->tail && s->packed == ids.size / 4 && f->layers[s->layer].start == f->start;
    need(r, right, "store-19", "a side of layer %u is not one sequence of the entry's tokens", s->layer);
  }
  check_payload(f, record.data + 64, "store-19");
}

static void check_states(kv_file *f, const kv_wanted *w) {
  kv_bytes record = feature(f, "prefix-states");
  bool right = record.size == 80 && !memcmp(record.data, w->key, 32);
  right = right && (!w->parent || !memcmp(record.data + 32, w->parent, 32));
  need(f->r, right, "store-21", "the file is not the entry of states with this entry key and chunk");
  check_identity(f, w, "store-21");
  need(f->r, !f->side_count && f->most <= 1, "store-21", "there are sides, or states of several sequences");
  check_payload(f, record.data + 64, "store-21");
}
/* Opens an entry that was found under an entry key. Refused entries count as absent. */
kv_file *kv_open_entry(kv_reader *r, kv_bytes entry, const kv_wanted *w) {
  need(r, entry.size <= w->limit, "store-7", "the entry has %llu bytes", entry.size);
  kv_bytes file = decrypted(r, entry, w);
  kv_file *f = is_page(file) ? kv_open_page(r, file) : kv_open(r, file);
  if (is_page(file)) {
    kv_bytes parts[] = {text_of("kvpack-page 2"), {file.data + 32, 32}, {file.data + 64, 32}, f->header};
    u8 own[32];
    sha256(prefixed(r, parts, 4), own);
    need(r, !memcmp(own, w->key, 32), "row-7", "the packed page has another entry key");
  } else if (w->states) check_states(f, w);
  else check_chunk(f, w);
  return f;
}
