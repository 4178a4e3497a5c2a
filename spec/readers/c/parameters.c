/* The parameters of codecs and sidecars in the header, by the tables of their documents. */
/* A map of the header that is read key by key. `keys` and `values` are the rules for keys and values. */
typedef struct {
  kv_reader *r;
  const kv_value *map;
  u64 at;
  const char *keys, *values;
} kv_cursor;

static bool key_is(const kv_cursor *m, const char *key) {
  return m->at < m->map->number && is(m->map->items[2 * m->at].bytes, key);
}

static const kv_value *next_value(kv_cursor *m, const char *key, char type) {
  need(m->r, key_is(m, key), m->keys, "the map key %s is missing or not in its place", key);
  const kv_value *value = &m->map->items[2 * m->at++ + 1];
  need(m->r, value->type == type, m->values, "%s has another type", key);
  return value;
}

static u64 integer(kv_cursor *m, const char *key, u64 low, u64 high) {
  u64 number = next_value(m, key, INTEGER)->number;
  need(m->r, number >= low && number <= high, m->values, "%s is %llu", key, number);
  return number;
}

static u32 choice(kv_cursor *m, const char *key, const char *words) {
  int found = word_of(next_value(m, key, STRING)->bytes, words);
  need(m->r, found >= 0, m->values, "%s has a value that does not exist", key);
  return found;
}

static void end_map(kv_cursor *m) { need(m->r, m->at == m->map->number, m->keys, "a key is too many"); }
/* Keys, each with an integer (a range, p of powers of two; # for any), a string (its words, or " for any), or
 * bytes (*, and their number). A sidecar is such a value or a map of them. */
static const char *const car_schemas[CARS][2] = {
    {"balanced", "basis:*32 layer:0-4095 frame:balanced|centered"},
    {"channel_scale", "channel_scale:fp16|fp32"}, {"channel_order", "channel_order:u8|u16"},
    {"block_rotation", "block_rotation:2-1024"}, {"key_mean", "tokens:p8-1024 bits:p4-8"},
    {"outliers", "fields:#"}, {"qjl", "seed:# norm:fp16|fp32 fields:#"},
    {"raw_tokens", "raw_tokens:bf16|fp16|fp32"}, {"raw_positions", "raw_positions:bf16|fp16|fp32"}};
/* A parameter by its key, or all zeros; the key of a sidecar with a map begins with its name and a dot. */
static const kv_parameter *find(const kv_codec *c, const char *key) {
  static const kv_parameter absent;
  for (u32 i = 0; i < c->parameter_count; i++)
    if (!strcmp(c->parameters[i].key, key)) return &c->parameters[i];
  return &absent;
}
/* Returns the number of a parameter, or for words the index of the word. */
static u64 num(const kv_codec *c, const char *key) { return find(c, key)->number; }
static kv_bytes blob(const kv_codec *c, const char *key) { return find(c, key)->bytes; }
/* Returns the dtype that a parameter names. That of log8 is bytes. */
static kv_dtype dtype_of(const kv_codec *c, const char *key) {
  static const kv_dtype dtypes[] = {U8, U8, U16, F16, BF16, F32};
  return dtypes[word_of(blob(c, key), "log8|u8|u16|fp16|bf16|fp32")];
}
static bool has(const kv_codec *c, u32 car) { return c->cars >> car & 1; }
/* Read the values of a schema by their keys, before which `prefix` is put. */
static void read_parameters(kv_cursor *m, kv_codec *c, const char *prefix, const char *schema) {
  for (; *schema; schema += strcspn(schema, " "), schema += *schema == ' ') {
    kv_parameter *p = &c->parameters[c->parameter_count++];
    snprintf(p->key, sizeof p->key, "%s%.*s", prefix, (int)strcspn(schema, ":"), schema);
    schema += strcspn(schema, ":") + 1;
    bool power = *schema == 'p', number = power || *schema == '#' || (*schema >= '0' && *schema <= '9');
    const char *key = p->key + strlen(prefix);
    const kv_value *v = next_value(m, key, number ? INTEGER : *schema == '*' ? BINARY : STRING);
    u64 low = 0, high = UINT64_MAX, size = v->bytes.size;
    int word = v->type == STRING && *schema != '"' ? word_of(v->bytes, schema) : 0;
    if (number && *schema != '#') sscanf(schema + power, "%llu-%llu", &low, &high);
    if (*schema == '*') sscanf(schema, "*%llu", &size);
    bool right = word >= 0 && size == v->bytes.size && v->number >= low && v->number <= high &&
                 (!power || is_power(v->number));
    need(m->r, right, m->values, "%s has a value that does not exist: %llu", key, v->number);
    p->number = v->type == STRING ? (u64)word : v->number;
    p->bytes = v->bytes;
  }
}
/* Adds a code stream. `second` is the base of a second digit, or 0. */
static void add_symbols(kv_codec *c, const char *name, u64 symbols, u64 base, u64 alphabet, u64 second) {
  kv_packing *p = &c->packings[c->packing_count++];
  *p = (kv_packing){"", symbols, second ? 2 : 1, 0, {base, second}, {alphabet, second}, 0, 0, 0};
  snprintf(p->name, sizeof p->name, "%s", name);
}

static void add(kv_codec *c, const char *name, u64 n, u64 base) { add_symbols(c, name, n, base, base, 0); }

static void set_fields(kv_reader *r, kv_packing *p, u64 fields) {
  p->fields = fields > 128 ? 0 : fields;
  need(r, pack_sizes(p), "front-5", "%llu fields of %s exceed a limit of packing", fields, p->name);
}
/* A table of `count` binary32 numbers that must be from 0 to `high` and strictly ascending. */
static void check_table(kv_cursor *m, kv_bytes table, u64 count, float high, const char *rule) {
  need(m->r, table.size == 4 * count, m->values, "a table has %llu bytes, not %llu", table.size, 4 * count);
  for (u64 i = 0; i < count; i++) {
    float number = number_at(F32, table.data, i), last = i ? number_at(F32, table.data, i - 1) : -1;
    bool right = number >= 0 && number <= high && number > last;
    need(m->r, right, rule, "number %llu of a table is out of range or order", i);
  }
}

static u64 power_above(u64 number) { return (u64)1 << (highest(number - 1) + 1); }

static void finish_angle(kv_cursor *m, kv_codec *c) {
  u64 bins = num(c, "bins"), low = bins & (0 - bins), high = bins / low;
  u64 n = c->dim / 2, bits = num(c, "norm_bits");
  bool direct = num(c, "arrangement"), norms = num(c, "norm");
  bool fits = norms ? bits : !bits && !direct && !num(c, "range");
  need(m->r, c->dim % 2 == 0 && fits, m->values, "dim is odd, or norms do not fit norm_bits or range");
  u64 base = power_above(bins), rounded = default_bytes(n, base), exact = default_bytes(n, bins);
  u64 parts = low > 1 && high > 1 ? default_bytes(n, low) + default_bytes(n, high) : UINT64_MAX;
  c->low = low;
  c->split = !direct && parts < rounded && parts <= exact;
  if (direct) add_symbols(c, "symbol", n, base, bins, 1u << bits);
  else if (c->split) add(c, "angle_low", n, low);
  else add_symbols(c, "angle", n, exact < rounded ? bins : base, bins, 0);
  if (c->split) add(c, "angle_high", n, high);
  if (norms && !direct) add(c, "norm_codes", n, 1u << bits);
}

static void finish_group(kv_cursor *m, kv_codec *c) {
  (void)m;
  c->group = num(c, "axis") ? 1 : num(c, "size");
  add(c, "codes", c->dim, 1u << num(c, "bits"));
}

static void finish_klt(kv_cursor *m, kv_codec *c) {
  u64 counts[9] = {0}, size = blob(c, "widths").size, none = size;
  const kv_value *fields = key_is(m, "fields") ? &m->map->items[2 * m->at + 1] : NULL;
  c->by_head = fields && fields->type == MAP && fields->number && is(fields->items[0].bytes, "codes");
  u64 each = c->by_head ? 8 : 16, blocks = (c->dim + each - 1) / each;
  need(m->r, c->by_head ? size % blocks == 0 : size == blocks, m->values, "widths has %llu bytes", size);
  for (u64 i = 0; i < size; i++) {
    u64 width = blob(c, "widths").data[i], left = c->dim - i % blocks * each, n = left < each ? left : each;
    need(m->r, width <= 8, m->values, "a width is %llu", width);
    counts[width] += n;
    c->row_bytes += (n * width + 7) / 8;
    none -= !width;
  }
  need(m->r, none, m->values, "all widths are 0");
  c->heads = size / blocks;
  for (u32 width = 1; width <= 8 && !c->by_head; width++)
    if (counts[width])
      add(c, (char[]){'c', 'o', 'd', 'e', 's', '_', '0' + width, 0}, counts[width], 1u << width);
}

static void finish_chunk(kv_cursor *m, kv_codec *c) {
  c->group = num(c, "chunk");
  const char *rule = c->id == LOSSLESS ? "lossless-4" : "transform-3";
  need(m->r, c->group * c->dim <= 65536, rule, "chunk and dim have a product above 65536");
  if (c->id == LOSSLESS) add(c, "signed_fractions", c->dim, num(c, "dtype") ? 2048 : 256);
}

static void finish_minifloat(kv_cursor *m, kv_codec *c) {
  u64 scale = num(c, "scale_dtype"), element = num(c, "element");
  need(m->r, (num(c, "granularity") == 3) == (scale > 1), m->values, "scale_dtype does not fit granularity");
  need(m->r, scale < 3 || element == 2, "minifloat-4", "scales of e4m3 are for elements of e2m1");
  add(c, "codes", c->dim, element == 2 ? 16 : 256);
}

static void finish_octahedral(kv_cursor *m, kv_codec *c) {
  u64 axis = num(c, "b_dir") - 1, norm = num(c, "b_norm"), n = (c->dim + 2) / 3, all = 2 * axis + norm;
  check_table(m, blob(c, "direction_table"), 1u << axis, 1, "octahedral-4");
  check_table(m, blob(c, "norm_table"), 1u << norm, 1, "octahedral-4");
  c->split = !all || all > 16 || (all & (all - 1));
  c->low = c->split ? 2 * axis : all;
  u64 index = 1u << c->low, sign = c->split ? 4u << norm : 4, padded = (n + 23) / 24 * 24;
  if (!num(c, "arrangement")) {
    if (c->low) add(c, "index", n, index);
    add(c, "sign", n, sign);
  } else if (c->low && index * sign > 256) add_symbols(c, "symbol", padded, index, index, sign);
  else add(c, "symbol", padded, index * sign);
}

static void finish_polar(kv_cursor *m, kv_codec *c) {
  kv_bytes text = blob(c, "bits"), rest = blob(c, "angle_table");
  u32 radii = c->dim, codes = 0, tables = 0, levels = c->levels = (text.size + 1) / 2;
  bool right = text.size % 2 && text.size < 20 && (2u << levels) < 4 * c->dim && c->dim % 2 == 0;
  for (u64 i = 0; right && i < text.size; i++)
    right = i % 2 ? text.data[i] == '.' : text.data[i] >= '1' && text.data[i] <= '8';
  need(m->r, right, m->values, "bits or dim has a value that does not exist");
  for (u32 l = 0; l < levels; l++) {
    u32 bits = text.data[2 * l] - '0', pairs = radii / 2, size = 1u << bits;
    bool unequal = pairs << (l + 1) > c->dim;
    u32 own = l ? (pairs > unequal) + unequal : 0;
    c->level[l] = (kv_level){radii, pairs, bits, codes, tables, unequal};
    for (u32 i = 0; i < own; i++) {
      need(m->r, rest.size >= 4 * size, "polar-4", "angle_table is cut short");
      check_table(m, cut(&rest, 4 * size), size, as_float(0x3fc90fda), "polar-4");
    }
    char name[20];
    snprintf(name, sizeof name, "angles%u", l + 1);
    if (!l || bits != c->level[l - 1].bits) add(c, name, 0, size);
    c->packings[c->packing_count - 1].symbols += pairs;
    codes += pairs;
    tables += size * (l ? own : 1);
    radii = (radii + 1) / 2;
  }
  need(m->r, !rest.size, "polar-4", "angle_table has bytes left over");
  c->radii = radii;
}

static void finish_quaternion(kv_cursor *m, kv_codec *c) {
  u64 n = (c->dim + 3) / 4, seeds = num(c, "secondary"), words = 24 * seeds;
  u64 radii = 1u << num(c, "radius_bits");
  bool direct = num(c, "arrangement");
  need(m->r, !direct || seeds <= 2730, m->values, "secondary is %llu", seeds);
  c->low = words & (0 - words);
  u64 high = words / c->low, parts = default_bytes(n, c->low) + default_bytes(n, high);
  c->split = !direct && (words > 65536 || parts < default_bytes(n, words));
  if (direct) add_symbols(c, "symbol", n, power_above(words), words, radii);
  else add(c, c->split ? "codeword_low" : "codeword", n, c->split ? c->low : words);
  if (c->split) add(c, "codeword_high", n, high);
  if (!direct) add(c, "radius", n, radii);
}

static void finish_scalar(kv_cursor *m, kv_codec *c) {
  u64 high = 0, bits = num(c, "bits"), bits_high = num(c, "bits_high");
  u64 size = bits_high ? (c->dim + 7) / 8 : 0;
  kv_bytes channels = blob(c, "high_channels");
  bool right = (!bits_high || bits_high > bits) && channels.size == size;
  need(m->r, right, m->values, "bits_high is not above bits, or high_channels has not %llu bytes", size);
  for (u32 i = 0; i < 8 * size; i++) {
    bool is_high = get_bits(channels.data, i, 1);
    need(m->r, i < c->dim || !is_high, "scalar-6", "a channel from dim on is high");
    high += is_high;
  }
  need(m->r, !bits_high || (high && high < c->dim), "scalar-5", "all channels have one width");
  check_table(m, blob(c, "magnitude_table"), 1u << (bits - 1), 1, "scalar-4");
  check_table(m, blob(c, "high_magnitude_table"), bits_high ? 1u << (bits_high - 1) : 0, 1, "scalar-4");
  add(c, "codes", c->dim - high, 1u << bits);
  if (high) add(c, "codes_high", high, 1u << bits_high);
}

static void finish_trellis(kv_cursor *m, kv_codec *c) {
  u64 state = num(c, "state_bits"), bits = c->dim * num(c, "bits");
  kv_bytes table = blob(c, "table");
  need(m->r, state != 9, m->values, "state_bits is 9");
  need(m->r, table.size == 2u << state, "trellis-4", "table has %llu bytes", table.size);
  for (u64 i = 0; i < table.size / 2; i++)
    need(m->r, fabsf(number_at(F16, table.data, i)) <= 1, "trellis-4", "a value of table is beyond 1");
  need(m->r, bits % 16 == 0, "trellis-3", "a token does not have whole words");
  add(c, "codes", bits / 16, 65536);
}

static void check_order(kv_reader *r, u32 n) { need(r, paley_order(n), "front-7", "no rotation of %u", n); }

static void read_cars(kv_cursor *m, kv_codec *c) {
  for (u32 car = 0; car < CARS; car++) {
    const char *name = car_schemas[car][0], *schema = car_schemas[car][1];
    if (!key_is(m, name)) continue;
    c->cars |= 1u << car;
    if (!strncmp(schema, name, strlen(name))) read_parameters(m, c, "", schema);
    else {
      kv_cursor map = {m->r, next_value(m, name, MAP), 0, m->values, m->values};
      char before[24];
      snprintf(before, sizeof before, "%s.", name);
      read_parameters(&map, c, before, schema);
      end_map(&map);
    }
  }
  for (u32 car = 0; car < CARS; car++)
    need(m->r, !key_is(m, car_schemas[car][0]), "side-cars-2", "%s is not in its place", car_schemas[car][0]);
  u64 block = num(c, "block_rotation");
  bool right = (!block || c->dim % block == 0) && (num(c, "key_mean.bits") != 4 || c->dim % 2 == 0);
  right = right && (!has(c, ORDER) || num(c, "channel_order") || c->dim <= 256);
  need(m->r, right, m->values, "a parameter of a sidecar does not fit dim");
  if (block) check_order(m->r, block);
  need(m->r, !has(c, MEAN) || c->group == 1, "side-cars-15", "the codec has a token group of %llu", c->group);
  if (has(c, MEAN)) c->group = num(c, "key_mean.tokens");
  need(m->r, !has(c, OUTLIERS) || c->dim % 4 == 0, "side-cars-4", "dim is not a multiple of 4");
  if (has(c, QJL)) check_order(m->r, c->dim);
  c->flags = c->packing_count;
  if (has(c, OUTLIERS)) add(c, "outlier_flags", c->dim / 4, 2);
  if (has(c, OUTLIERS)) set_fields(m->r, &c->packings[c->flags], num(c, "outliers.fields"));
  c->sketch = c->packing_count;
  if (has(c, QJL)) add(c, "qjl_signs", c->dim, 2);
  if (has(c, QJL)) set_fields(m->r, &c->packings[c->sketch], num(c, "qjl.fields"));
}

#define ROTATION " rotation_kind:none|hadamard|signed-hadamard seed:#"
#define LOG " norm:fp16|fp32|log8"
/* Codecs in the order of their names: what is checked besides the schema of their parameters after dim, the
 * least dim, the rule by which they have no sidecars, and the schema. */
static const struct {
  void (*finish)(kv_cursor *, kv_codec *);
  u32 least;
  const char *cars, *schema;
} codecs[CODECS] = {
    {finish_angle, 2, NULL,
        "bins:2-65536 norm:fp32|linear|log norm_bits:0-8 arrangement:dense|direct range:fp16|fp32" ROTATION},
    {finish_group, 1, NULL,
        "bits:1-8 axis:token|channel size:p4-128" ROTATION
        " token_scale:none|fp16|fp32|fp16-per-head|fp32-per-head"},
    {finish_klt, 1, "klt-4", "basis:*32 layer:0-4095 side:k|v rows:basis|fp16|fp32 widths:* gain:none|fp16"},
    {finish_chunk, 1, "lossless-5", "dtype:bf16|fp16 chunk:p16-256"},
    {finish_minifloat, 1, NULL,
        "element:e4m3|e5m2|e2m1 granularity:tensor|head|token|block scale_dtype:fp16|fp32|e8m0|e4m3"},
    {finish_octahedral, 4, NULL,
        "b_dir:1-8 b_norm:0-8 arrangement:dense|direct" LOG ROTATION " direction_table:* norm_table:*"},
    {NULL, 1, "row-8", ""}, {finish_polar, 2, NULL, "bits:\" norm:fp16|fp32" ROTATION " angle_table:*"},
    {finish_quaternion, 1, NULL,
        "secondary:1-4096 radius_bits:1-8 arrangement:dense|direct norm:fp16|fp32" ROTATION
        " rotation_seed:#"},
    {NULL, 1, "side-cars-1", "dtype:bf16|fp16|fp32"},
    {finish_scalar, 2, NULL,
        "bits:1-8 bits_high:0-8 high_channels:*" LOG ROTATION " magnitude_table:* high_magnitude_table:*"},
    {finish_chunk, 1, "transform-4",
        "basis:*32 layer:0-4095 side:k|v scope:head|layer step:0-255 chunk:p16-256"},
    {finish_trellis, 1, NULL, "bits:1-4 state_bits:8-10" LOG ROTATION " table:*"}};

static void read_codec(kv_reader *r, const kv_value *map, kv_codec *c) {
  kv_cursor m = {r, map, 0, "container-11", "container-11"};
  kv_bytes name = next_value(&m, "id", STRING)->bytes;
  int id = word_of(name, codec_names);
  char rules[3][20];
  need(r, id >= 0 && (id != OPAQUE || r->page), "container-12", "the codec is not known");
  for (int i = 0; i < 3; i++)
    snprintf(rules[i], 20, "%.*s-%d", (int)name.size, (const char *)name.data, i + 1);
  m.keys = id == OPAQUE ? "row-8" : rules[0];
  m.values = id == OPAQUE ? "row-8" : rules[1];
  c->id = id;
  c->group = 1;
  c->dim = integer(&m, "dim", codecs[id].least, MAX_DIM);
  read_parameters(&m, c, "", codecs[id].schema);
  if (codecs[id].finish) codecs[id].finish(&m, c);
  if (id == TRELLIS) set_fields(r, &c->packings[0], 1);
  if ((c->packing_count || c->by_head) && id != TRELLIS) {
    kv_cursor fields = {r, next_value(&m, "fields", MAP), 0, rules[2], m.values};
    for (kv_packing *p = c->packings; p < c->packings + c->packing_count; p++)
      set_fields(r, p, next_value(&fields, p->name, INTEGER)->number);
    if (c->by_head) integer(&fields, "codes", 8, 8);
    end_map(&fields);
  }
  c->ranged = id == GROUP && key_is(&m, "scale_dtype");
  m.values = "group-4";
  if (c->ranged) choice(&m, "scale_dtype", "u8");
  if (num(c, "rotation_kind")) check_order(r, c->dim);
  c->own_packings = c->packing_count;
  c->cars = is(blob(c, "norm"), "log8") << LOG_NORMS | (num(c, "token_scale") > 2) << HEAD_SCALES;
  m.values = "side-cars-3";
  bool positions = (id == KLT || id == TRANSFORM) && key_is(&m, "raw_positions");
  for (u32 car = 0; codecs[id].cars && !positions && car < CARS; car++)
    need(r, !key_is(&m, car_schemas[car][0]), codecs[id].cars, "the codec has no %s", car_schemas[car][0]);
  read_cars(&m, c);
  end_map(&m);
}
