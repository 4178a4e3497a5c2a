/* The codecs klt, lossless and transform: coordinates of a basis, and coded symbols. */
/* Check the streams of lossless or transform, without a basis, and decode the exponent fields of lossless. */
static void check_coded(kv_file *f, kv_side *side) {
  kv_reader *r = f->r;
  bool lossless = side->codec->id == LOSSLESS;
  u32 symbols = num(side->codec, "dtype") ? 32 : 256, dim = side->codec->dim, lanes[32];
  const kv_tensor *counts = stream(side, "word_counts"), *frequencies = stream(side, "frequencies");
  const kv_tensor *tokens = stream(side, "tokens"), *columns = stream(side, "columns");
  u64 sum = 0;
  for (u64 i = 0; i < counts->count; i++) sum += get_int(counts, i) << (counts->rank == 4 && i % 2 ? 16 : 0);
  const char *rule = lossless ? "lossless-6" : "transform-10";
  need(r, sum == stream(side, "words")->count, rule, "word_counts sum to %llu", sum);
  if (lossless) side->symbols = take(r, times(times(side->rows, side->packed), dim), 1);
  coder own;
  const coder *const coders[] = {&own};
  for (segment s = {0}; next_segment(side, &s);) {
    if (lossless) {
      u64 n = s.tokens * dim, row = s.row * side->run_count + s.run;
      read_coder(r, frequencies, symbols * row, symbols, &own);
      u64 taken = read_symbols(r, &s, n, coders, n, side->symbols + (s.row * side->packed + s.token) * dim);
      need(r, taken == s.words.size, "rans-3", "symbols leave words");
    } else {
      u64 given = get_int(tokens, s.row / side->heads * side->groups + s.group);
      need(r, given == s.tokens, "transform-8", "a token group has %llu tokens", given);
      need(r, get_int(columns, s.number) <= dim, "transform-9", "a coded block has too many coordinates");
      read_lanes(r, &s, lanes);
    }
  }
}
/* Adds x times a matrix of n rows and columns to sum. The matrix begins at element `first`. */
static void add_product(const double *x, const kv_tensor *matrix, u64 first, u64 n, double *sum) {
  for (u64 j = 0; j < n; j++)
    for (u64 c = 0; c < n; c++) sum[c] += x[j] * get(matrix, first + j * n + c);
}

static u32 width_of(const kv_codec *c, u64 head, u32 j) {
  return blob(c, "widths").data[c->by_head ? head * ((c->dim + 7) / 8) + j / 8 : j / 16];
}
/* Unpacks the codes of a head with widths per head, and checks the bits after the last coordinate. */
static void read_klt_codes(kv_file *f, const kv_side *side, const kv_place *at, u32 *codes) {
  const kv_codec *c = side->codec;
  const u8 *bytes = stream(side, "codes")->data + (at->sequence * side->packed + at->token) * c->row_bytes;
  for (u64 head = 0; head <= at->head; head++)
    for (u32 j = 0; j < c->dim; j += 8) {
      u32 width = width_of(c, head, j), n = c->dim - j < 8 ? c->dim - j : 8, bits = n * width;
      need(f->r, !get_bits(bytes, bits, -bits % 8), "klt-11", "a bit of no coordinate is set");
      for (u32 k = 0; head == at->head && k < n; k++) codes[j + k] = (u32)get_bits(bytes, k * width, width);
      bytes += (bits + 7) / 8;
    }
}
/* Unpacks the codes of all coordinates of a token in one head. */
static void read_all_codes(kv_file *f, const kv_side *side, const kv_place *at, u32 *codes) {
  const kv_codec *c = side->codec;
  if (c->by_head) read_klt_codes(f, side, at, codes);
  for (u32 i = 0; i < c->own_packings; i++) {
    u32 digits[MAX_DIM], next = 0;
    read_digits(f, side, at, i, digits);
    for (u32 j = 0; j < c->dim; j++)
      if (1u << width_of(c, at->head, j) == c->packings[i].base[0]) codes[j] = digits[next++];
  }
}

static void decode_klt(kv_file *f, kv_side *side) {
  const kv_codec *c = side->codec;
  const kv_side *found = side;
  if (!num(c, "rows")) {
    kv_file *basis = find_basis(f, blob(c, "basis"), "klt-5");
    bool exists = num(c, "layer") < basis->layer_count;
    found = exists ? basis->layers[num(c, "layer")].sides[num(c, "side")] : NULL;
  }
  need(f->r, found != NULL, "klt-6", "the basis has no such side");
  need(f->r, found->codec->dim == c->dim && found->heads == side->heads, "klt-7", "its heads are others");
  const kv_tensor *vectors = stream(found, num(c, "rows") ? "rows" : "values"), *gains = stream(side, "gain");
  u64 dim = c->dim, rows = num(c, "rows") ? basis_vectors(c->dim) : vectors->shape[2];
  for (kv_place at = {0}; walk(side, &at);) {
    u64 first = (num(c, "rows") ? at.row * side->run_count + at.run : at.head) * rows * dim;
    double gain = gains ? get(gains, token_row(side, &at)) : 1, u[MAX_DIM], sum[MAX_DIM] = {0};
    u32 codes[MAX_DIM];
    read_all_codes(f, side, &at, codes);
    for (u32 j = 0; j < dim; j++) {
      u32 width = width_of(c, at.head, j);
      u64 level = first + (2 + dim) * dim + 510 * (j / 16) + (1u << width) - 2;
      u[j] = 256.0 * get(vectors, first + j);
      if (width) u[j] += get(vectors, level + codes[j]) * gain;
    }
    add_product(u, vectors, first + dim, dim, sum);
    for (u32 j = 0; j < dim; j++) side->early[token_row(side, &at) * dim + j] = (float)sum[j];
  }
}
/* The frames, scales, tables and RoPE of a side of transform. */
typedef struct {
  const kv_tensor *frames, *scales, *values, *rope;
  bool halves, whole;
  u64 n, symbols, coder_count;
  coder *coders;
} matrices;
/* Rotates a token to its position (basis.md, Rotary positions). */
static void turn(const matrices *m, double *x, u64 position) {
  u64 pairs = m->rope ? m->rope->shape[1] : 0;
  for (u64 i = 0; i < pairs; i++) {
    double *a = &x[m->halves ? i : 2 * i], *b = &x[m->halves ? i + pairs : 2 * i + 1], before = *a;
    double angle = (double)position * (double)get(m->rope, i), c = cos(angle), s = sin(angle);
    *a = before * c - *b * s;
    *b = *b * c + before * s;
  }
}
/* Decodes a segment to the coordinates `v` of the tokens of its group. */
static void read_block(kv_file *f, const kv_side *side, const matrices *m, const segment *s, double *v) {
  const kv_codec *codec = side->codec;
  u64 count = get_int(stream(side, "columns"), s->number), head = s->row % side->heads, numbers[MAX_DIM];
  const coder *coders[MAX_DIM];
  u8 symbols[65536];
  u64 step = num(codec, "step");
  double delta = exp2(-(double)step / 16);
  for (u64 c = 0; c < count; c++) {
    u32 scale = m->scales->data[m->whole ? c * side->heads + head : head * m->n + c];
    u64 number = step > scale ? (step - scale) / 4 : 0;
    numbers[c] = number < m->coder_count ? number : m->coder_count - 1;
    coders[c] = &m->coders[numbers[c]];
  }
  u64 taken = read_symbols(f->r, s, count * s->tokens, coders, s->tokens, symbols);
  for (u64 i = 0; i < codec->dim * s->tokens; i++) {
    u64 c = i / s->tokens, t = i % s->tokens;
    u64 each = side->heads * codec->dim, at = m->whole ? c * side->heads + head : head * codec->dim + c;
    double *to = &v[t * each + at];
    *to = 0;
    if (c < count && symbols[i]) *to = delta * get(m->values, numbers[c] * (m->symbols - 1) + symbols[i] - 1);
    if (c >= count || symbols[i]) continue;
    need(f->r, taken + 4 <= s->words.size, "transform-11", "escapes take more words than there are");
    *to = delta * (double)(int32_t)little(s->words.data + taken, 4);
    taken += 4;
  }
  need(f->r, taken == s->words.size, "transform-11", "symbols and escapes leave words");
}

static void decode_transform(kv_file *f, kv_side *side) {
  kv_reader *r = f->r;
  const kv_codec *c = side->codec;
  const kv_file *basis = find_basis(f, blob(c, "basis"), "transform-5");
  matrices m = {.whole = num(c, "scope"), .n = num(c, "scope") ? side->heads * c->dim : c->dim};
  u32 layer = num(c, "layer"), which = num(c, "side");
  m.frames = basis_state(basis, layer, which ? "v.frames" : "k.frames");
  m.scales = basis_state(basis, layer, which ? "v.scales" : "k.scales");
  need(r, m.frames != NULL, "transform-6", "the basis has no matrices for the side");
  bool right = basis->layers[layer].sides[which]->codec->dim == c->dim && m.frames->shape[3] == m.n;
  right = right && m.frames->shape[1] == (m.whole ? 1 : side->heads);
  need(r, right, "transform-7", "the matrices of the basis are of other heads");
  m.halves = basis_state(basis, layer, "rope.halves") != NULL;
  m.rope = which ? NULL : basis_state(basis, layer, m.halves ? "rope.halves" : "rope.neighbours");
  const kv_tensor *frequencies = basis_state(basis, 0, "table.frequencies");
  m.values = basis_state(basis, 0, "table.values");
  m.coder_count = frequencies->shape[1];
  m.symbols = frequencies->shape[2];
  m.coders = take(r, m.coder_count, sizeof *m.coders);
  for (u64 i = 0; i < m.coder_count; i++) read_coder(r, frequencies, i * m.symbols, m.symbols, &m.coders[i]);
  u64 heads = side->heads, dim = c->dim, n = m.n, each = heads * dim;
  u64 most = side->packed < c->group ? side->packed : c->group;
  double *v = take(f->r, times(most, each), sizeof *v), *u = take(f->r, each, sizeof *u);
  const kv_tensor *positions = stream(side, "positions");
  for (segment s = {0}; next_segment(side, &s);) {
    u64 sequence = s.row / heads;
    read_block(f, side, &m, &s, v);
    if (s.row % heads < heads - 1) continue;
    u64 position = positions ? little(positions->data + 4 * (sequence * side->groups + s.group), 4) : 0;
    for (u64 t = 0; t < s.tokens; t++) {
      for (u64 i = 0; i < each; i++) u[i] = get(m.frames, i / n * (1 + n) * n + i % n);
      for (u64 q = 0; q < each / n; q++)
        add_product(v + t * each + q * n, m.frames, (q * (1 + n) + 1) * n, n, u + q * n);
      for (u64 h = 0; h < heads; h++) {
        float *to = side->early + ((sequence * heads + h) * side->packed + s.token + t) * dim;
        turn(&m, u + h * dim, position + t);
        for (u64 k = 0; k < dim; k++) to[k] = (float)u[h * dim + k];
      }
    }
  }
}
