/* Sidecars, the rotation back, and the values of a side (side-cars.md). */
/* Counts the flags before each token, sequence and head. Items are stored in this order. */
static void check_outliers(kv_file *f, kv_side *side) {
  u32 flags[MAX_DIM / 4], quadruples = side->codec->dim / 4;
  u64 count = 0, *first = side->outliers = take(f->r, times(side->rows, side->packed), sizeof *first);
  for (kv_place at = {0}; walk(side, &at);) {
    read_digits(f, side, &at, side->codec->flags, flags);
    for (u32 i = 0; i < quadruples; i++) first[token_row(side, &at)] += flags[i];
  }
  for (u64 i = 0; i < side->rows * side->packed; i++) {
    u64 *own = &first[i % side->rows * side->packed + i / side->rows], flagged = *own;
    *own = count;
    count += flagged;
  }
  need(f->r, count == stream(side, "outliers")->shape[2], "side-cars-5", "%llu flags are 1", count);
}

static void check_sidecars(kv_file *f, kv_side *side) {
  const kv_tensor *scales = stream(side, "channel_scale"), *orders = stream(side, "channel_order");
  const kv_tensor *flags = stream(side, "raw_token_flags");
  u64 dim = side->codec->dim, raw = 0;
  bool seen[MAX_DIM];
  for (u64 i = 0; scales && i < scales->count; i++)
    need(f->r, get(scales, i) > 0, "side-cars-6", "a channel scale is not above 0");
  for (u64 i = 0; orders && i < orders->count; i++) {
    u64 channel = get_int(orders, i);
    if (i % dim == 0) memset(seen, 0, sizeof seen);
    need(f->r, channel < dim && !seen[channel], "side-cars-8", "a row of channel_order is no order");
    seen[channel] = true;
  }
  if (has(side->codec, OUTLIERS)) check_outliers(f, side);
  for (u64 i = 0; flags && i < flags->count; raw += flags->data[i++])
    need(f->r, flags->data[i] <= 1, "side-cars-7", "a flag of raw tokens is %u", flags->data[i]);
  need(f->r, !flags || raw == stream(side, "raw_tokens")->shape[2], "side-cars-5", "%llu flags are 1", raw);
  const kv_tensor *positions = stream(side, "raw_positions"), *values = stream(side, "raw_values");
  u64 count = positions ? positions->shape[2] : 0, last = 0, bytes = count ? values->bytes / count : 0;
  bool unused = false, right = !positions || count == values->shape[2];
  need(f->r, right, "side-cars-12", "positions and values differ in number");
  for (u64 i = 0; i < count; i++) {
    u64 token = little(positions->data + 8 * i, 6), sequence = little(positions->data + 8 * i + 6, 2);
    u64 place = token << 16 | sequence;
    unused = unused || !place;
    right = !place || (!unused && token && token <= side->packed && sequence < side->batch && place > last);
    for (u64 k = 0; right && !place && k < bytes; k++) right = !values->data[i * bytes + k];
    need(f->r, right, "side-cars-13", "position %llu has another form", i);
    last = place;
  }
}

static void put_outliers(kv_file *f, const kv_side *side, const kv_place *at, float *u) {
  u32 flags[MAX_DIM / 4];
  u64 item = side->outliers[token_row(side, at)];
  read_digits(f, side, at, side->codec->flags, flags);
  for (u32 i = 0; i < side->codec->dim / 4; i++) {
    for (u32 k = 0; flags[i] && k < 4; k++) u[4 * i + k] = get(stream(side, "outliers"), 4 * item + k);
    item += flags[i];
  }
}

static void add_mean(const kv_side *side, const kv_place *at, float *u) {
  u32 dim = side->codec->dim, bits = num(side->codec, "key_mean.bits"), bytes = dim * bits / 8;
  u64 row = at->row * side->groups + at->group;
  float scale = get(stream(side, "key_mean_scale"), row);
  const u8 *means = stream(side, "key_mean")->data + row * bytes;
  for (u32 c = 0; c < dim; c++) {
    int q = bits == 8 ? means[c] : c < bytes ? means[c] & 15 : means[c - bytes] >> 4;
    u[c] += (float)(q - (1 << (bits - 1))) * scale;
  }
}

static void add_qjl(kv_file *f, const kv_side *side, const kv_place *at, float *u) {
  const kv_codec *c = side->codec;
  u32 digits[MAX_DIM];
  double z[MAX_DIM], x[MAX_DIM];
  read_digits(f, side, at, c->sketch, digits);
  for (u32 j = 0; j < c->dim; j++) z[j] = digits[j] ? -1 : 1;
  rotate_back(z, x, c->dim, c->qjl_signs);
  double norm = get(stream(side, "qjl_norm"), token_row(side, at));
  double factor = norm * sqrt(PI / (2.0 * c->dim));
  for (u32 j = 0; j < c->dim; j++) u[j] = (float)(u[j] + factor * x[j]);
}
/* Applies the inverse rotation with its signs, or multiplies by the matrix of a head. */
static void turn_back(float *u, u32 dim, const signed char *signs, const kv_tensor *matrix, u64 head) {
  double from[MAX_DIM] = {0}, to[MAX_DIM] = {0};
  for (u32 j = 0; j < dim; j++) from[j] = u[j];
  if (matrix) add_product(from, matrix, head * dim * dim, dim, to);
  else rotate_back(from, to, dim, signs);
  for (u32 j = 0; j < dim; j++) u[j] = (float)to[j];
}

static void decode_cars(kv_file *f, kv_side *side, const kv_place *at, const kv_tensor *matrix, float *u) {
  const kv_codec *c = side->codec;
  const kv_tensor *orders = stream(side, "channel_order"), *scales = stream(side, "channel_scale");
  u64 block = num(c, "block_rotation"), first = (at->row * side->run_count + at->run) * c->dim;
  float x[MAX_DIM];
  if (has(c, OUTLIERS)) put_outliers(f, side, at, u);
  if (has(c, MEAN)) add_mean(side, at, u);
  if (has(c, QJL)) add_qjl(f, side, at, u);
  if (num(c, "rotation_kind")) turn_back(u, c->dim, c->signs, NULL, 0);
  for (u64 i = 0; block && i < c->dim; i += block) turn_back(u + i, block, NULL, NULL, 0);
  memcpy(x, u, c->dim * sizeof *u);
  for (u64 i = 0; i < c->dim; i++) u[orders ? get_int(orders, first + i) : i] = x[i];
  for (u64 j = 0; scales && j < c->dim; j++) u[j] *= get(scales, first + j);
  if (matrix) turn_back(u, c->dim, NULL, matrix, at->head);
}
/* Copies the values of an item to all heads of a token. */
static void put_item(const kv_side *s, const kv_tensor *items, u64 item, u64 sequence, u64 token, float *to) {
  u64 dim = s->codec->dim, each = s->heads * dim;
  for (u64 i = 0; i < each; i++)
    to[((sequence * s->heads + i / dim) * s->tokens + token) * dim + i % dim] = get(items, item * each + i);
}

static void put_raw(const kv_side *side, float *values) {
  const kv_tensor *flags = stream(side, "raw_token_flags"), *positions = stream(side, "raw_positions");
  u64 item = 0, batch = side->batch;
  for (u64 i = 0; flags && i < flags->count; i++)
    if (flags->data[i % batch * side->packed + i / batch])
      put_item(side, stream(side, "raw_tokens"), item++, i % batch, i / batch, values);
  for (u64 i = 0; positions && i < positions->shape[2]; i++) {
    u64 token = little(positions->data + 8 * i, 6), sequence = little(positions->data + 8 * i + 6, 2);
    if (token) put_item(side, stream(side, "raw_values"), i, sequence, token - 1, values);
  }
}

u64 kv_value_count(const kv_side *side) { return times(times(side->rows, side->tokens), side->codec->dim); }
/* Decodes a side of a file that kv_check accepted to [batch, kv_head, token, channel], with its tail. */
void kv_decode(kv_file *f, kv_side *side, float *values) {
  kv_codec *c = side->codec;
  u64 dim = c->dim, tail = side->tail * dim, each = side->packed * dim + tail;
  const kv_tensor *matrix = NULL, *raw = stream(side, "tail");
  if (has(c, BALANCED)) {
    kv_file *basis = find_basis(f, blob(c, "balanced.basis"), "side-cars-16");
    matrix =
        basis_state(basis, num(c, "balanced.layer"), num(c, "balanced.frame") ? "k.centered" : "k.balanced");
    need(f->r, matrix != NULL, "side-cars-17", "the basis has no balanced matrices of the layer");
    bool same = matrix->shape[1] == side->heads && matrix->shape[2] == dim;
    need(f->r, same, "side-cars-18", "the balanced matrices are of other heads");
  }
  if (c->id == TRANSFORM) find_basis(f, blob(c, "basis"), "transform-5");
  if (c->id == KLT && !num(c, "rows")) find_basis(f, blob(c, "basis"), "klt-5");
  kv_block *mark = f->r->blocks; /* bases stay, and what is taken for this side goes */
  prepare_codec(f->r, c);
  if (c->id == KLT || c->id == TRANSFORM) {
    side->early = take(f->r, times(times(side->rows, side->packed), dim), sizeof(float));
    if (c->id == KLT) decode_klt(f, side);
    else decode_transform(f, side);
  }
  for (kv_place at = {0}; walk(side, &at);) {
    float *to = values + at.row * each + at.token * dim;
    decode_token(f, side, &at, to);
    decode_cars(f, side, &at, matrix, to);
  }
  for (u64 i = 0; i < side->rows * tail; i++) values[i / tail * each + each - tail + i % tail] = get(raw, i);
  put_raw(side, values);
  release(f->r, mark);
}
