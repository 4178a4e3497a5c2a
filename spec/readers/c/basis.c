/* Bases: the rules for their headers and values, and the bases that a caller passes (basis.md). */
static void need_layer(kv_file *f, u32 layer, bool right, const char *rule, const char *why) {
  need(f->r, right, rule, "layer %u of the basis: %s", layer, why);
}

static kv_tensor *basis_state(const kv_file *basis, u32 layer, const char *name) {
  for (kv_state *s = basis->states; s < basis->states + basis->state_count; s++)
    if (s->layer == layer && !strcmp(s->name, name)) return s->tensor;
  return NULL;
}
/* Returns whether a state has one of two dtypes and the shape 1, x, y, z, which ends at the first 0. */
static bool has_shape(const kv_tensor *t, kv_dtype a, kv_dtype b, u64 x, u64 y, u64 z) {
  u64 shape[] = {1, x, y, z};
  bool right = (t->dtype == a || t->dtype == b) && t->rank == 2u + (y > 0) + (z > 0);
  for (u32 i = 0; right && i < t->rank; i++) right = t->shape[i] == shape[i];
  return right;
}

static void check_matrices(kv_file *f, u32 l, u32 which) {
  const kv_tensor *frames = basis_state(f, l, which ? "v.frames" : "k.frames");
  const kv_tensor *scales = basis_state(f, l, which ? "v.scales" : "k.scales");
  const kv_side *side = f->layers[l].sides[which];
  if (!frames && !scales) return;
  need_layer(f, l, frames && scales && side, "basis-8", "matrices or vectors are missing");
  u64 heads = side->heads, n = side->codec->dim, all = heads * n;
  bool right = has_shape(frames, F16, F32, heads, 1 + n, n) && has_shape(scales, U8, U8, heads, n, 0);
  right = right || (has_shape(frames, F16, F32, 1, 1 + all, all) && has_shape(scales, U8, U8, 1, all, 0));
  need_layer(f, l, right, "basis-9", "matrices or scales have another dtype or shape");
}
/* The states of balanced keys and of RoPE. */
static void check_key_states(kv_file *f, u32 l) {
  const kv_tensor *balanced = basis_state(f, l, "k.balanced"), *centered = basis_state(f, l, "k.centered");
  const kv_tensor *queries = basis_state(f, l, "k.queries"), *mean = basis_state(f, l, "k.mean");
  const kv_tensor *halves = basis_state(f, l, "rope.halves"), *rope = basis_state(f, l, "rope.neighbours");
  const kv_tensor *first = balanced ? balanced : centered;
  const kv_side *keys = f->layers[l].sides[0];
  u64 heads = keys ? keys->heads : first ? first->shape[1] : 0;
  u64 n = keys ? keys->codec->dim : first ? first->shape[2] : 0;
  need_layer(f, l, first || (!queries && !mean), "basis-21", "there are no balanced matrices");
  bool right = !first || (first->rank == 4 && n <= MAX_DIM);
  right = right && (!balanced || has_shape(balanced, F16, F32, heads, n, n));
  right = right && (!centered || has_shape(centered, F16, F32, heads, n, n));
  right = right && (!queries || has_shape(queries, F32, F32, heads, n, n));
  right = right && (!mean || has_shape(mean, F32, F32, heads, n, 0));
  need_layer(f, l, right, "basis-22", "a state of balanced keys has another dtype or shape");
  need_layer(f, l, !halves || !rope, "basis-12", "there are two pairings of RoPE");
  rope = halves ? halves : rope;
  right = !rope || (has_shape(rope, F32, F32, rope->shape[1], 0, 0) && 2 * rope->shape[1] <= n);
  need_layer(f, l, right, "basis-13", "frequencies of RoPE have another dtype or shape");
}

static void check_basis_header(kv_file *f) {
  bool frames = false;
  for (u32 i = 0; i < f->side_count; i++) {
    const kv_side *s = f->sides[i];
    const kv_codec *c = s->codec;
    need_layer(f, s->layer, c->id == RAW && num(c, "dtype"), "basis-1", "a side is not raw in fp16 or fp32");
    need_layer(f, s->layer, s->batch == 1 && !s->tail, "basis-2", "a side has sequences or a tail");
    need_layer(f, s->layer, s->packed >= basis_vectors(c->dim), "basis-3", "a side has too few vectors");
  }
  for (u32 l = 0; l < f->layer_count; l++) {
    check_matrices(f, l, 0);
    check_matrices(f, l, 1);
    frames = frames || basis_state(f, l, "k.frames") || basis_state(f, l, "v.frames");
    check_key_states(f, l);
  }
  const kv_tensor *frequencies = basis_state(f, 0, "table.frequencies");
  const kv_tensor *values = basis_state(f, 0, "table.values");
  need_layer(f, 0, (!frames || frequencies) && !frequencies == !values, "basis-10", "tables are missing");
  if (!frequencies) return;
  u64 tables = frequencies->shape[1], symbols = frequencies->shape[2];
  bool right = symbols >= 4 && has_shape(frequencies, U16, U16, tables, symbols, 0) && tables <= 64;
  right = right && symbols <= 256 && symbols % 2 == 0 && has_shape(values, F16, F16, tables, symbols - 1, 0);
  need_layer(f, 0, right, "basis-11", "tables have another dtype or shape");
}
/* Checks the values of a basis. */
static void check_basis(kv_file *f) {
  for (u32 i = 0; i < f->side_count; i++) {
    const kv_tensor *values = stream(f->sides[i], "values");
    need(f->r, all_finite(values), "basis-4", "%s has a number that is not finite", values->name);
  }
  for (kv_state *s = f->states; s < f->states + f->state_count; s++) {
    kv_bytes name = text_of(s->name);
    int which = word_of(name, "k.frames|v.frames|table.values|k.balanced|k.centered|k.queries|k.mean");
    bool own = which >= 0 && (which != 2 || !s->layer);
    const char *rule = which < 3 ? "basis-14" : "basis-23";
    need(f->r, !own || all_finite(s->tensor), rule, "%s is not finite", s->tensor->name);
    for (u64 i = 0; word_of(name, "rope.halves|rope.neighbours") >= 0 && i < s->tensor->count; i++) {
      float number = get(s->tensor, i);
      need(f->r, number >= 0 && number <= 2, "basis-15", "a frequency of RoPE is not from 0 to 2");
    }
  }
  const kv_tensor *frequencies = basis_state(f, 0, "table.frequencies");
  for (u64 i = 0; frequencies && i < frequencies->shape[1]; i++) {
    coder own;
    read_coder(f->r, frequencies, i * frequencies->shape[2], frequencies->shape[2], &own);
  }
}
/* Returns the basis with a digest, which the caller must have passed. */
static kv_file *find_basis(kv_file *f, kv_bytes digest, const char *rule) {
  kv_reader *r = f->r;
  u8 found[32] = {0};
  u64 i = 0;
  for (; i < r->base_count; i++) {
    sha256(r->bases[i], found);
    if (!memcmp(found, digest.data, 32)) break;
  }
  need(r, i < r->base_count, rule, "the basis %08llx... was not given", big(digest.data, 4));
  if (!r->opened) r->opened = take(r, r->base_count, sizeof *r->opened);
  if (!r->opened[i]) {
    kv_file *basis = kv_open(r, r->bases[i]);
    need(r, basis->basis, "basis-18", "the file with the digest of the basis is a cache");
    kv_check(basis);
    r->opened[i] = basis;
  }
  return r->opened[i];
}
