/* Decoding of each codec in the coded frame, before sidecars and the inverse rotation (codecs/). */
_Static_assert(FLT_EVAL_METHOD == 0, "an operation in binary32 is rounded once");
/* Returns direction p of `bins` angles around the circle. Directions on an axis are exact. */
static void put_bin(float to[2], u64 p, u64 bins) {
  double angle = PI * (2.0 * p + 1) / bins;
  to[0] = 4 * p + 2 == bins || 4 * p + 2 == 3 * bins ? 0 : (float)cos(angle);
  to[1] = 2 * p + 1 == bins ? 0 : (float)sin(angle);
}
/* Computes the codewords of the next quaternion: its products with 24 unit quaternions. */
static void put_codewords(float *to, u64 *state) {
  double q[4], first = disc(state, q), second = disc(state, q + 2), t = sqrt((1 - first) / second);
  double w = (float)q[0], x = (float)q[1], y = (float)(q[2] * t), z = (float)(q[3] * t);
  for (u32 p = 0; p < 24; p++, to += 4) {
    double u[4];
    for (u32 i = 0; i < 4; i++)
      u[i] = p < 8 ? (p / 2 == i) * (p % 2 ? -1 : 1) : (p - 8) >> i & 1 ? -0.5 : 0.5;
    to[0] = (float)(u[0] * w - u[1] * x - u[2] * y - u[3] * z);
    to[1] = (float)(u[0] * x + u[1] * w + u[2] * z - u[3] * y);
    to[2] = (float)(u[0] * y - u[1] * z + u[2] * w + u[3] * x);
    to[3] = (float)(u[0] * z + u[1] * y - u[2] * x + u[3] * w);
  }
}
/* Computes the tables that all tokens of a codec share, until they are released. */
static void prepare_codec(kv_reader *r, kv_codec *c) {
  kv_bytes table = blob(c, "angle_table");
  u64 seeds = num(c, "secondary"), state = num(c, "seed");
  u64 first = c->id == POLAR ? 1u << c->level[0].bits : 0;
  u64 seed = num(c, c->id == QUATERNION ? "rotation_seed" : "seed");
  c->signs = num(c, "rotation_kind") == 2 ? make_signs(r, seed, c->dim) : NULL;
  c->qjl_signs = make_signs(r, num(c, "qjl.seed"), c->dim);
  c->directions = take(r, 96 * seeds + 2 * first + table.size / 2, sizeof(float));
  for (u64 s = 0; s < seeds; s++) { put_codewords(c->directions + 96 * s, &state); }
  for (u64 p = 0; p < first; p++) put_bin(c->directions + 2 * p, p, first);
  for (u64 i = 0; i < table.size / 4; i++) {
    double angle = number_at(F32, table.data, i);
    c->directions[2 * (first + i)] = (float)cos(angle);
    c->directions[2 * (first + i) + 1] = (float)sin(angle);
  }
}
/* Unpacks the digits of all code streams of a codec, stream by stream. */
static void read_codes(kv_file *f, const kv_side *s, const kv_place *at, u32 *codes) {
  for (u32 i = 0; i < s->codec->own_packings; i++) {
    read_digits(f, s, at, i, codes);
    codes += s->codec->packings[i].digits * s->codec->packings[i].symbols;
  }
}
/* Returns code i of n symbols, whose codes may be stored in two parts. */
static u64 whole_code(const kv_codec *c, const u32 *codes, u64 n, u64 i) {
  return codes[i] + (c->split ? codes[n + i] * c->low : 0);
}
/* Returns the norm of a token in one head. */
static float norm_of(const kv_side *s, const kv_place *at) {
  const kv_tensor *t = stream(s, "norm");
  u64 index = token_row(s, at);
  return t->dtype == U8 ? norm_of_code(t->data[index]) : get(t, index);
}
/* Returns an 8-bit scale (0) or center (1), decoded with the row of its run. */
static float ranged(const kv_tensor *ranges, u64 row, u64 kind, u64 k) {
  float step = get(ranges, 4 * row + 2 * kind), minimum = get(ranges, 4 * row + 2 * kind + 1);
  float r = minimum + step * (float)k;
  return round_half(r * fabsf(r));
}

static void decode_group(const kv_side *s, const kv_place *at, const u32 *codes, float *u) {
  const kv_codec *c = s->codec;
  const kv_tensor *scales = stream(s, "scales"), *ranges = stream(s, "scale_range");
  const kv_tensor *factors = stream(s, "token_scale");
  u64 size = num(c, "axis") ? num(c, "size") : 1, run = at->row * s->run_count + at->run;
  u64 row = num(c, "axis") ? token_row(s, at) : at->row * s->groups + at->group;
  u64 factor = (num(c, "token_scale") > 2 ? at->row : at->sequence) * s->packed + at->token;
  float half = (float)((1u << num(c, "bits")) - 1) / 2;
  for (u64 j = 0; j < c->dim; j++) {
    u64 first = 2 * (row * ((c->dim + size - 1) / size) + j / size);
    float scale = ranges ? ranged(ranges, run, 0, scales->data[first]) : get(scales, first);
    float center = ranges ? ranged(ranges, run, 1, scales->data[first + 1]) : get(scales, first + 1);
    u[j] = ((float)codes[j] - half) * scale + center;
    if (factors) u[j] *= get(factors, factor);
  }
}

static float element_value(u32 code, int exponents, int fractions, int bias) {
  u32 e = code >> fractions & ((1u << exponents) - 1), f = code & ((1u << fractions) - 1);
  float size = ldexpf((float)(e ? f | 1u << fractions : f), (e ? (int)e : 1) - bias - fractions);
  return code >> (exponents + fractions) & 1 ? -size : size;
}

static void decode_minifloat(const kv_side *s, const kv_place *at, const u32 *codes, float *u) {
  static const int forms[3][3] = {{4, 3, 7}, {5, 2, 15}, {2, 1, 1}};
  const kv_codec *c = s->codec;
  const kv_tensor *blocks = stream(s, "block_scales"), *all = stream(s, blocks ? "global_scale" : "scale");
  u64 kind = num(c, "scale_dtype"), shared = num(c, "granularity"), width = kind == 3 ? 16 : 32;
  const int *form = forms[num(c, "element")];
  u64 row = (shared == 1 || shared == 2 ? at->row : at->sequence) * (shared == 2 ? s->packed : s->run_count);
  float scale = all ? get(all, row + (shared == 2 ? at->token : at->run)) : 1;
  for (u64 j = 0; j < c->dim; j++) {
    float v = element_value(codes[j], form[0], form[1], form[2]);
    int k = blocks ? blocks->data[token_row(s, at) * ((c->dim + width - 1) / width) + j / width] : 0;
    if (kind == 3) v *= element_value(k, 4, 3, 7);
    u[j] = kind == 2 ? (float)ldexp(v, k - 127) : v * scale;
  }
}

static void decode_scalar(const kv_side *s, const kv_place *at, const u32 *codes, float *u) {
  const kv_codec *c = s->codec;
  const kv_bytes tables[] = {blob(c, "magnitude_table"), blob(c, "high_magnitude_table")};
  const u32 *parts[] = {codes, codes + c->packings[0].symbols};
  const u8 *channels = blob(c, "high_channels").data;
  for (u64 j = 0; j < c->dim; j++) {
    bool high = c->own_packings > 1 && get_bits(channels, j, 1);
    u64 code = *parts[high]++, half = tables[high].size / 4;
    float a = number_at(F32, tables[high].data, code % half);
    u[j] = (code >= half ? -a : a) * norm_of(s, at);
  }
}

static void decode_trellis(const kv_side *s, const kv_place *at, const u32 *codes, float *u) {
  const kv_codec *c = s->codec;
  u64 bits = num(c, "bits"), size = num(c, "state_bits"), n = c->dim * bits;
  u8 bytes[MAX_DIM + 2]; /* the string, and its beginning once more */
  for (u64 i = 0; i < n / 8 + 2; i++) bytes[i] = (u8)(codes[i % (n / 8) / 2] >> 8 * (i % 2));
  for (u64 j = 0; j < c->dim; j++) {
    u64 state = get_bits(bytes, (bits * (j + 1) + n - size) % n, (int)size);
    u[j] = number_at(F16, blob(c, "table").data, state) * norm_of(s, at);
  }
}

static void decode_octahedral(const kv_side *s, const kv_place *at, const u32 *codes, float *u) {
  const kv_codec *c = s->codec;
  const u8 *table = blob(c, "direction_table").data, *norms = blob(c, "norm_table").data;
  u64 axis = num(c, "b_dir") - 1, mask = (1u << axis) - 1, symbols = c->packings[0].symbols;
  bool two = c->packings[0].digits == 2 || (!num(c, "arrangement") && c->low);
  for (u64 t = 0; 3 * t < c->dim; t++) {
    u64 index = two || c->low ? codes[t] & ((1u << c->low) - 1) : 0;
    u64 sign = two ? codes[symbols + t] : codes[t] >> c->low;
    u64 level = c->split ? sign >> 2 : index >> 2 * axis;
    double xi = number_at(F32, table, index & mask), eta = number_at(F32, table, index >> axis & mask);
    double z = (1 - xi) - eta, x = z >= 0 ? xi : 1 - eta, y = z >= 0 ? eta : 1 - xi;
    double length = sqrt(x * x + y * y + z * z);
    float d[3] = {(float)(x / length), (float)(y / length), (float)(z / length)};
    for (u64 k = 0; k < 3 && 3 * t + k < c->dim; k++) {
      float part = k < 2 && sign >> k & 1 ? -d[k] : d[k];
      u[3 * t + k] = part * number_at(F32, norms, level) * norm_of(s, at);
    }
  }
}

static void decode_quaternion(const kv_side *s, const kv_place *at, const u32 *codes, float *u) {
  const kv_codec *c = s->codec;
  u64 n = (c->dim + 3) / 4;
  float scale = get(stream(s, "scale"), token_row(s, at)) / (float)((1u << num(c, "radius_bits")) - 1);
  for (u64 j = 0; j < c->dim; j++) {
    float r = (float)codes[(c->split ? 2 * n : n) + j / 4] * scale;
    u[j] = r * c->directions[4 * whole_code(c, codes, n, j / 4) + j % 4];
  }
}

static void decode_angle(const kv_side *s, const kv_place *at, const u32 *codes, float *u) {
  const kv_codec *c = s->codec;
  u64 n = c->dim / 2, kind = num(c, "norm"), row = token_row(s, at);
  const kv_tensor *t = stream(s, kind ? "range" : "norm");
  for (u64 i = 0; i < n; i++) {
    u32 code = kind ? codes[(c->split ? 2 * n : n) + i] : 0;
    float r = kind ? get(t, 2 * row + 1) + get(t, 2 * row) * (float)code : get(t, row * n + i);
    if (kind == 2) r = (float)exp2(r);
    put_bin(u + 2 * i, whole_code(c, codes, n, i), num(c, "bins"));
    for (u64 k = 0; k < 2; k++) u[2 * i + k] *= r;
  }
}

static void decode_polar(const kv_side *s, const kv_place *at, const u32 *codes, float *u) {
  const kv_codec *c = s->codec;
  for (u32 i = 0; i < c->radii; i++) u[i] = get(stream(s, "radius"), token_row(s, at) * c->radii + i);
  for (const kv_level *l = c->level + c->levels; l-- > c->level;) {
    float below[MAX_DIM];
    if (l->radii % 2) below[l->radii - 1] = u[l->pairs];
    for (u32 i = 0; i < l->pairs; i++) {
      bool other = l->unequal && i && i == l->pairs - 1;
      u32 angle = l->tables + (other ? 1u << l->bits : 0) + codes[l->codes + i];
      for (u32 k = 0; k < 2; k++) below[2 * i + k] = u[i] * c->directions[2 * angle + k];
    }
    memcpy(u, below, l->radii * sizeof *u);
  }
}

static void decode_lossless(const kv_side *s, const kv_place *at, const u32 *codes, float *u) {
  bool half = num(s->codec, "dtype");
  u32 fraction = half ? 10 : 7;
  for (u64 j = 0; j < s->codec->dim; j++) {
    u32 exponent = s->symbols[token_row(s, at) * s->codec->dim + j], rest = codes[j] & ((1u << fraction) - 1);
    u32 bits = codes[j] >> fraction << 15 | exponent << fraction | rest;
    u[j] = half ? from_half((u16)bits) : as_float(bits << 16);
  }
}
/* Decodes a token in one head from stored values, from values decoded earlier, or from codes. */
static void decode_token(kv_file *f, kv_side *s, const kv_place *at, float *u) {
  static void (*const decoders[])(const kv_side *, const kv_place *, const u32 *, float *) = {decode_angle,
      decode_group, NULL, decode_lossless, decode_minifloat, decode_octahedral, NULL, decode_polar,
      decode_quaternion, NULL, decode_scalar, NULL, decode_trellis};
  u32 codes[2 * MAX_DIM] = {0};
  u64 dim = s->codec->dim, first = token_row(s, at) * dim;
  const kv_tensor *stored = s->codec->id == RAW ? stream(s, "values") : stream(s, "bytes");
  if (decoders[s->codec->id]) {
    read_codes(f, s, at, codes);
    decoders[s->codec->id](s, at, codes, u);
  } else
    for (u64 j = 0; j < dim; j++) u[j] = s->early ? s->early[first + j] : get(stored, first + j);
}
/* Checks the codec's rules for its streams, and every digit. */
static void check_codec(kv_file *f, kv_side *s) {
  static const u32 finite[] = {0x7f, 0x7c, 0x100}; /* the elements of minifloat that are not, from these on */
  const kv_codec *c = s->codec;
  const kv_tensor *blocks = stream(s, "block_scales"), *ranges = stream(s, "scale_range");
  bool powers = num(c, "scale_dtype") == 2, padded = c->id == OCTAHEDRAL && num(c, "arrangement");
  u32 codes[2 * MAX_DIM], n = (u32)(c->dim + 2) / 3;
  if (c->id == LOSSLESS || c->id == TRANSFORM) check_coded(f, s);
  const char *rule = powers ? "minifloat-7" : "minifloat-8";
  for (u64 i = 0; blocks && i < blocks->count; i++)
    need(f->r, blocks->data[i] < (powers ? 0xff : 0x7f), rule, "a scale is not finite");
  for (u64 i = 0; ranges && i < ranges->count; i++)
    need(f->r, isfinite(ranged(ranges, i / 4, i % 4 / 2, i % 2 * 255)), "group-7", "a range is not finite");
  for (kv_place at = {0}; walk(s, &at);) {
    for (u32 i = c->own_packings; i < c->packing_count; i++) read_digits(f, s, &at, i, codes);
    read_codes(f, s, &at, codes);
    for (u64 j = 0; c->id == MINIFLOAT && j < c->dim; j++)
      need(f->r, (codes[j] & 0x7f) < finite[num(c, "element")], "minifloat-6", "an element is not finite");
    for (u32 i = 0; padded && i < c->packings[0].digits * c->packings[0].symbols; i++)
      need(f->r, i % c->packings[0].symbols < n || !codes[i], "octahedral-5", "a padding is not zero");
    if (c->by_head) read_klt_codes(f, s, &at, codes);
  }
}
