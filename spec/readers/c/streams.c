/* The streams of a side in the order of their documents, and the walk through tokens. */
/* Compares a tensor with the one that the header lists in its place. */
static void check_listed(kv_file *f, kv_tensor *t, const kv_value *item) {
  kv_reader *r = f->r;
  const kv_value *parts = item->items, *sizes = &parts[2];
  bool right = item->type == ARRAY && item->number == 6;
  for (int i = 0; right && i < 6; i++) right = parts[i].type == "ssasib"[i];
  for (u64 i = 0; right && i < sizes->number; i++) right = sizes->items[i].type == INTEGER;
  right = right && parts[5].bytes.size == 16 && word_of(parts[3].bytes, "none|zstd") >= 0;
  need(r, right, "container-11", "the tensor %s is listed in another form", t->name);
  bool same = is(parts[0].bytes, t->name) && is(parts[1].bytes, dtype_names[t->dtype]);
  for (u32 i = 0; i < sizes->number && i < t->rank; i++) same = same && sizes->items[i].number == t->shape[i];
  need(r, same && sizes->number == t->rank, "container-16", "%s is not what is listed", t->name);
  t->zstd = is(parts[3].bytes, "zstd");
  t->stored = parts[4].number;
  t->digest = parts[5].bytes.data;
  bool whole = t->stored == t->bytes && t->bytes != UINT64_MAX, fits = t->bytes <= times(t->stored, 256);
  need(r, t->zstd || whole, "container-17", "%s has other bytes than its shape takes", t->name);
  need(r, !t->zstd || fits, "container-29", "%s has more than 256 times its stored bytes", t->name);
}
/* Plans the next tensor, which must be the one that the header lists. */
static kv_tensor *plan(kv_file *f, const char *name, kv_dtype dtype, u32 rank, const u64 *shape) {
  bool planned = f->r->page || f->tensor_count < f->listed->number;
  need(f->r, planned, "container-16", "the tensor %s is not listed", name);
  kv_tensor *t = &f->tensors[f->tensor_count++];
  snprintf(t->name, sizeof t->name, "%s", name);
  t->dtype = dtype;
  t->rank = rank;
  memcpy(t->shape, shape, rank * sizeof *shape);
  t->count = 1;
  for (u32 i = 0; i < rank; i++) t->count = times(t->count, shape[i]);
  t->stored = t->bytes = times(t->count, dtype_bytes[dtype]);
  if (!f->r->page) check_listed(f, t, &f->listed->items[f->tensor_count - 1]);
  return t;
}

static kv_tensor *stream(const kv_side *s, const char *name) {
  for (u32 i = 0; i < s->tensor_count; i++)
    if (!strcmp(strchr(s->tensors[i].name, '.') + 3, name)) return &s->tensors[i];
  return NULL;
}

static float get(const kv_tensor *t, u64 index) { return number_at(t->dtype, t->data, index); }
static u64 get_int(const kv_tensor *t, u64 index) { return (u64)get(t, index); }

static bool all_finite(const kv_tensor *t) {
  for (u64 i = 0; t->dtype >= F16 && i < t->count; i++)
    if (!isfinite(get(t, i))) return false;
  return true;
}
/* Returns N(dim), the number of vectors of a head. */
static u64 basis_vectors(u64 dim) { return 2 + dim + (510 * ((dim + 15) / 16) + dim - 1) / dim; }
/* Returns whether a codec or one of its sidecars has a stream with one row per run. */
static bool rows_per_run(const kv_codec *c) {
  bool runs = c->id == MINIFLOAT && (num(c, "granularity") < 2 || num(c, "scale_dtype") == 3);
  return runs || c->id == LOSSLESS || c->ranged || num(c, "rows") || has(c, SCALE) || has(c, ORDER);
}

static void add_tensor(kv_file *f, kv_side *s, const char *name, kv_dtype dtype, u32 rank, const u64 *shape) {
  char whole[56];
  snprintf(whole, sizeof whole, "%u.%c.%s", s->layer, s->which ? 'v' : 'k', name);
  kv_tensor *t = plan(f, whole, dtype, rank, shape);
  t->any = word_of(text_of(name), "values|raw_tokens|raw_values|tail") >= 0;
  if (!s->tensors) s->tensors = t;
  s->tensor_count++;
}
/* A stream of `count` rows for every sequence and head, or for all heads together; the sizes end with a 0. */
static void rows(kv_file *f, kv_side *s, const char *name, u32 dtype, u64 heads, u64 count, u64 x, u64 y) {
  add_tensor(f, s, name, dtype, 3 + (x > 0) + (y > 0), (u64[]){s->batch, heads, count, x, y});
}
/* A stream of items, whose number is in `entries`. */
static void items(kv_file *f, kv_side *s, const char *name, u32 dtype, u64 size, u64 more) {
  u64 at = s->entry_count++;
  const kv_value *all = s->entries, *own = all && at < all->number ? &all->items[2 * at] : NULL;
  bool right = own && is(own[0].bytes, name) && own[1].type == INTEGER;
  need(f->r, right, "container-11", "entries does not give the items of %s in its place", name);
  need(f->r, own[1].number <= MAX_TOKENS, "container-29", "%s has %llu items", name, own[1].number);
  add_tensor(f, s, name, dtype, 3 + (size > 0) + (more > 0), (u64[]){1, 1, own[1].number, size, more});
}

static void planes(kv_file *f, kv_side *s, u32 packing) {
  const kv_packing *p = &s->codec->packings[packing];
  s->planes[packing] = s->tensor_count;
  for (u32 plane = 0; plane < p->planes; plane++) {
    char name[32];
    bool half = p->bytes % 2 && plane == p->planes - 1;
    snprintf(name, sizeof name, "%s.%u", p->name, plane);
    rows(f, s, name, U16, s->heads, s->packed, half ? (p->columns + 1) / 2 : p->columns, 0);
  }
}

static void plan_side(kv_file *f, kv_side *s) {
  const kv_codec *c = s->codec;
  u64 heads = s->heads, tokens = s->packed, runs = s->run_count, groups = s->groups, dim = c->dim, id = c->id;
  u64 shared = num(c, "granularity"), kind = num(c, "scale_dtype"), scale = num(c, "token_scale");
  u64 axis = num(c, "axis"), width = axis ? (dim + num(c, "size") - 1) / num(c, "size") : dim;
  for (u32 i = 0; i < c->own_packings; i++) planes(f, s, i);
  if (id == ANGLE && num(c, "norm")) rows(f, s, "range", dtype_of(c, "range"), heads, tokens, 2, 0);
  if (id == ANGLE && !num(c, "norm")) rows(f, s, "norm", F32, heads, tokens, dim / 2, 0);
  if (id == GROUP) rows(f, s, "scales", c->ranged ? U8 : F16, heads, axis ? tokens : groups, width, 2);
  if (c->ranged) rows(f, s, "scale_range", F16, heads, runs, 4, 0);
  if (scale) rows(f, s, "token_scale", scale % 2 ? F16 : F32, scale > 2 ? heads : 1, tokens, 0, 0);
  if (c->by_head) rows(f, s, "codes", U8, 1, tokens, c->row_bytes, 0);
  if (num(c, "gain")) rows(f, s, "gain", F16, heads, tokens, 0, 0);
  if (num(c, "rows")) rows(f, s, "rows", dtype_of(c, "rows"), heads, runs, basis_vectors(dim), dim);
  if (id == MINIFLOAT && shared < 2) rows(f, s, "scale", kind ? F32 : F16, shared ? heads : 1, runs, 0, 0);
  if (shared == 2) rows(f, s, "scale", kind ? F32 : F16, heads, tokens, 0, 0);
  u64 block = kind == 3 ? 16 : 32;
  if (shared == 3) rows(f, s, "block_scales", U8, heads, tokens, (dim + block - 1) / block, 0);
  if (kind == 3) rows(f, s, "global_scale", F32, 1, runs, 0, 0);
  if (id == LOSSLESS) rows(f, s, "frequencies", U16, heads, runs, num(c, "dtype") ? 32 : 256, 0);
  if (id == TRANSFORM && !num(c, "side")) rows(f, s, "positions", U16, 1, groups, 2, 0);
  if (id == TRANSFORM) rows(f, s, "tokens", U16, 1, groups, 0, 0);
  if (id == TRANSFORM) rows(f, s, "columns", U16, heads, groups, 0, 0);
  if (num(c, "chunk")) rows(f, s, "states", U16, heads, groups, 64, 0);
  if (num(c, "chunk")) rows(f, s, "word_counts", U16, heads, groups, id == LOSSLESS ? 0 : 2, 0);
  if (num(c, "chunk")) items(f, s, "words", U16, 0, 0);
  if (id == OPAQUE) rows(f, s, "bytes", U8, heads, tokens, dim, 0);
  if (id == POLAR) rows(f, s, "radius", dtype_of(c, "norm"), heads, tokens, c->radii, 0);
  if (id == QUATERNION) rows(f, s, "scale", dtype_of(c, "norm"), heads, tokens, 0, 0);
  if (id == RAW) rows(f, s, "values", dtype_of(c, "dtype"), heads, tokens, dim, 0);
  if (id == OCTAHEDRAL || id == SCALAR || id == TRELLIS)
    rows(f, s, "norm", dtype_of(c, "norm"), heads, tokens, 0, 0);
  if (has(c, SCALE)) rows(f, s, "channel_scale", dtype_of(c, "channel_scale"), heads, runs, dim, 0);
  if (has(c, ORDER)) rows(f, s, "channel_order", dtype_of(c, "channel_order"), heads, runs, dim, 0);
  if (has(c, MEAN)) rows(f, s, "key_mean", U8, heads, s->groups, dim * num(c, "key_mean.bits") / 8, 0);
  if (has(c, MEAN)) rows(f, s, "key_mean_scale", F16, heads, s->groups, 0, 0);
  if (has(c, OUTLIERS)) planes(f, s, c->flags);
  if (has(c, OUTLIERS)) items(f, s, "outliers", F16, 4, 0);
  if (has(c, QJL)) planes(f, s, c->sketch);
  if (has(c, QJL)) rows(f, s, "qjl_norm", dtype_of(c, "qjl.norm"), heads, tokens, 0, 0);
  if (has(c, TOKENS)) rows(f, s, "raw_token_flags", U8, 1, tokens, 0, 0);
  if (has(c, TOKENS)) items(f, s, "raw_tokens", dtype_of(c, "raw_tokens"), heads, dim);
  if (has(c, POSITIONS)) items(f, s, "raw_positions", U16, 4, 0);
  if (has(c, POSITIONS)) items(f, s, "raw_values", dtype_of(c, "raw_positions"), heads, dim);
  bool all = s->entries ? s->entries->number == s->entry_count && s->entry_count : !s->entry_count;
  need(f->r, all, "container-11", "entries has a member too many");
  if (s->tail) rows(f, s, "tail", s->tail_dtype, heads, s->tail, dim, 0);
}
/* The place of a token. Its row is sequence * heads + head, and its number counts tokens of all runs. */
typedef struct {
  u64 sequence, head, row, token, run, in_run, group;
  bool begun;
} kv_place;
/* Moves to the next token, by sequence, head and token. Returns false after the last one. */
static bool walk(const kv_side *s, kv_place *at) {
  if (at->begun) {
    at->token++;
    bool ends = ++at->in_run == s->runs[at->run];
    at->group += ends || at->in_run % s->codec->group == 0;
    at->run += ends;
    if (ends) at->in_run = 0;
  }
  if (at->token == s->packed) *at = (kv_place){.row = at->row + at->begun};
  at->begun = true;
  at->sequence = at->row / s->heads;
  at->head = at->row % s->heads;
  return s->packed && at->row < s->rows;
}
/* Returns the number of a token among the tokens of all rows. */
static u64 token_row(const kv_side *s, const kv_place *at) { return at->row * s->packed + at->token; }

static void read_digits(kv_file *f, const kv_side *s, const kv_place *at, u32 packing, u32 *digits) {
  const u8 *data[8] = {NULL};
  const kv_packing *p = &s->codec->packings[packing];
  for (u32 i = 0; i < p->planes; i++) data[i] = s->tensors[s->planes[packing] + i].data;
  unpack(f->r, p, data, token_row(s, at), digits);
}
/* The entropy coder (rans.md), and the segments that it codes. */
typedef struct {
  u16 table[512]; /* f and b of every symbol by turns */
  u8 slots[4096]; /* their symbols */
} coder;

static void read_coder(kv_reader *r, const kv_tensor *frequencies, u64 first, u64 symbols, coder *c) {
  u64 sum = 0;
  for (u64 s = 0; s < symbols; s++) {
    u64 f = get_int(frequencies, first + s);
    need(r, sum + f <= 4096, "rans-1", "frequencies do not sum to 4096");
    c->table[2 * s] = (u16)f;
    c->table[2 * s + 1] = (u16)sum;
    for (; f; f--) c->slots[sum++] = (u8)s;
  }
  need(r, sum == 4096, "rans-1", "frequencies sum to %llu, not 4096", sum);
}
/* A segment: a token group of a row, the first of its tokens over all runs, and where its words begin. */
typedef struct {
  u64 row, group, number, run, in_run, token, tokens; /* number: of the group among those of all rows */
  kv_bytes words;
  const kv_tensor *counts, *states, *all;
} segment;
/* Reads the first states of the lanes, which must be high enough. */
static void read_lanes(kv_reader *r, const segment *s, u32 lanes[32]) {
  for (int i = 0; i < 32; i++) {
    lanes[i] = (u32)little(s->states->data + 128 * s->number + 4 * i, 4);
    need(r, lanes[i] >= 65536, "rans-2", "a first state is %u", lanes[i]);
  }
}
/* Moves to the next segment in the order of words. Returns false after the last one. */
static bool next_segment(const kv_side *side, segment *s) {
  if (!s->counts) {
    s->counts = stream(side, "word_counts");
    s->states = stream(side, "states");
    s->words.data = stream(side, "words")->data;
  } else if (++s->row == side->rows) {
    s->row = 0;
    s->group++;
    s->token += s->tokens;
    s->in_run += s->tokens;
    if (s->in_run == side->runs[s->run]) {
      s->run++;
      s->in_run = 0;
    }
  }
  if (s->group == side->groups) return false;
  u64 left = side->runs[s->run] - s->in_run;
  s->tokens = left < side->codec->group ? left : side->codec->group;
  s->number = s->row * side->groups + s->group;
  s->words.data += s->words.size;
  u64 bytes = s->counts->rank == 4 ? 4 : 2;
  s->words.size = 2 * little(s->counts->data + bytes * s->number, (int)bytes);
  return true;
}
/* Decodes a segment with one coder for every `tokens` symbols. Returns the bytes of words it read. */
static u64 read_symbols(kv_reader *r, const segment *s, u64 n, const coder *const *coders, u64 each, u8 *to) {
  u32 lanes[32];
  u64 taken = 0;
  read_lanes(r, s, lanes);
  for (u64 i = 0; i < n; i++) {
    u32 x = lanes[i % 32], slot = x % 4096;
    const coder *own = coders[i / each];
    u8 symbol = to[i] = own->slots[slot];
    x = own->table[2 * symbol] * (x / 4096) + slot - own->table[2 * symbol + 1];
    if (x < 65536) {
      need(r, taken + 2 <= s->words.size, "rans-3", "symbols take more words than there are");
      x = x << 16 | (u32)little(s->words.data + taken, 2);
      taken += 2;
    }
    lanes[i % 32] = x;
  }
  for (int i = 0; i < 32; i++) need(r, lanes[i] == 65536, "rans-4", "a last state is %u", lanes[i]);
  return taken;
}
