/* The fields of the header, its features, and the plan of tensors that follows from them (container.md). */
static void limit(kv_reader *r, const char *what, u64 number, u64 most) {
  need(r, number <= most, "container-29", "%s is %llu, above the limit %llu", what, number, most);
}

/* An integer with a limit of container.md. */
static u64 limited(kv_cursor *c, const char *key, u64 low, u64 most) {
  u64 number = integer(c, key, low, UINT64_MAX);
  limit(c->r, key, number, most);
  return number;
}

/* An array of values of one type, or a map to them whose keys ascend, which is why none occurs twice. */
static const kv_value *many(kv_cursor *c, const char *key, char type, char of) {
  const kv_value *found = next_value(c, key, type), *items = found->items;
  for (u64 i = 0; i < found->number; i++) {
    bool map = type == MAP;
    need(c->r, items[map ? 2 * i + 1 : i].type == of, c->values, "a member of %s has another type", key);
    bool ascends = !map || !i || compare(items[2 * i - 2].bytes, items[2 * i].bytes) < 0;
    need(c->r, ascends, "container-10", "the members of %s do not ascend", key);
  }
  return found;
}

static kv_side *read_side(kv_file *f, const kv_value *map, u32 layer, u32 which) {
  kv_reader *r = f->r;
  kv_side *side = take(r, 1, sizeof *side);
  kv_cursor c = {r, map, 0, "container-11", "container-11"};
  side->layer = layer;
  side->which = which;
  u64 number = integer(&c, "codec", 0, UINT64_MAX);
  need(r, number < f->codec_count, c.values, "there is no codec %llu", number);
  kv_codec *codec = side->codec = &f->codecs[number];
  side->batch = limited(&c, "batch", 1, 65536);
  side->heads = limited(&c, "heads", 1, 65536);
  side->rows = side->batch * side->heads;
  const kv_value *runs = many(&c, "runs", ARRAY, INTEGER);
  side->run_count = runs->number;
  side->runs = take(r, runs->number, sizeof *side->runs);
  for (u64 i = 0; i < runs->number; i++) {
    u64 run = side->runs[i] = runs->items[i].number;
    need(r, run, c.values, "a run is 0");
    side->packed = plus(side->packed, run);
    side->groups = plus(side->groups, run / codec->group + (run % codec->group > 0));
  }
  side->tail = limited(&c, "tail", 0, MAX_TOKENS);
  limit(r, "the number of tokens", plus(side->packed, side->tail), MAX_TOKENS);
  side->tail_dtype = (const kv_dtype[]){BF16, F16, F32}[choice(&c, "tail_dtype", "bf16|fp16|fp32")];
  side->window = limited(&c, "window", 0, MAX_TOKENS);
  need(r, side->window % codec->group == 0, "container-15", "window is not a multiple of the token group");
  side->entries = key_is(&c, "entries") ? next_value(&c, "entries", MAP) : NULL;
  end_map(&c);
  bool runs_right = runs->number < 2 || codec->group > 1 || rows_per_run(codec);
  need(r, runs_right, "container-18", "a codec that encodes tokens one by one has several runs");
  need(r, !which || !has(codec, MEAN), "side-cars-14", "values have key_mean");
  bool heads_right = !codec->by_head || side->heads == codec->heads;
  need(r, heads_right, "klt-10", "there are widths for %llu heads", codec->heads);
  return side;
}

static void read_layers(kv_file *f, kv_cursor *c) {
  kv_reader *r = f->r;
  const kv_value *layers = many(c, "layers", ARRAY, MAP);
  limit(r, "the number of layers", layers->number, 4096);
  f->layer_count = (u32)layers->number;
  f->layers = take(r, layers->number, sizeof *f->layers);
  f->sides = take(r, layers->number, 2 * sizeof *f->sides);
  for (u32 l = 0; l < f->layer_count; l++) {
    kv_cursor map = {r, &layers->items[l], 0, c->keys, c->values};
    for (u32 which = 0; which < 2; which++) {
      const char *name = which ? "v" : "k";
      bool nil = key_is(&map, name) && map.map->items[2 * map.at + 1].type == NIL;
      const kv_value *found = next_value(&map, name, nil ? NIL : MAP);
      if (!nil) f->sides[f->side_count++] = f->layers[l].sides[which] = read_side(f, found, l, which);
    }
    end_map(&map);
    kv_side *k = f->layers[l].sides[0], *v = f->layers[l].sides[1];
    if (!k || !v) continue;
    need(r, k->batch == v->batch, "container-13", "the sides of layer %u differ in batch", l);
    bool alike = k->packed + k->tail == v->packed + v->tail;
    need(r, alike, "container-14", "the sides of layer %u differ in tokens", l);
  }
}

static bool required(const kv_file *f, const char *name) {
  for (u64 i = 0; i < f->required->number; i++)
    if (is(f->required->items[i].bytes, name)) return true;
  return false;
}

static kv_bytes feature(const kv_file *f, const char *name) {
  for (u64 i = 0; i < f->ignorable->number; i++)
    if (is(f->ignorable->items[2 * i].bytes, name)) return f->ignorable->items[2 * i + 1].bytes;
  return (kv_bytes){NULL, 0};
}

/* Features that a file needs exactly if a codec has something. */
static void check_codec_features(kv_file *f) {
  static const char *const features[][2] = {{"balanced", "container-63"}, {"key-mean", "container-62"},
      {"log-norms", "container-64"}, {"raw-positions", "container-55"},
      {"token-scale-per-head", "container-61"}};
  bool found[5] = {false};
  for (kv_codec *codec = f->codecs; codec < f->codecs + f->codec_count; codec++) {
    found[0] |= has(codec, BALANCED);
    found[1] |= has(codec, MEAN);
    found[2] |= is(blob(codec, "norm"), "log8");
    found[3] |= has(codec, POSITIONS);
    found[4] |= num(codec, "token_scale") > 2;
  }
  for (int i = 0; i < 5; i++)
    need(f->r, required(f, features[i][0]) == found[i], features[i][1], "the feature %s is %s",
        features[i][0], found[i] ? "missing" : "named without need");
}

/* The data of a feature that has both a name and data, or neither: records of `size` bytes, or of any. */
static kv_bytes records(kv_file *f, const char *name, u64 size, const char *named, const char *sized) {
  kv_bytes data = feature(f, name);
  need(f->r, (data.data != NULL) == required(f, name), named, "the feature %s has a name or data, not both",
      name);
  bool right = !data.data || (data.size && data.size % size == 0);
  need(f->r, right, sized, "%s has %llu bytes", name, data.size);
  return data;
}

static void read_starts(kv_file *f) {
  kv_reader *r = f->r;
  u64 size = f->layer_count ? 8 * f->layer_count : 1;
  kv_bytes data = records(f, "layer-positions", size, "container-35", "container-36");
  bool differs = false;
  need(r, data.size <= size, "container-36", "layer-positions has %llu bytes", data.size);
  f->end = f->start;
  for (u32 l = 0; l < f->layer_count; l++) {
    kv_layer *layer = &f->layers[l];
    const kv_side *side = layer->sides[0] ? layer->sides[0] : layer->sides[1];
    layer->start = data.data ? little(data.data + 8 * l, 8) : f->start;
    limit(r, "the start of a layer", layer->start, MAX_TOKENS);
    need(r, layer->start >= f->start, "container-37", "layer %u starts before the range", l);
    bool right = side || layer->start == f->start;
    need(r, right, "container-38", "layer %u has no sides and a start", l);
    differs = differs || layer->start != f->start;
    u64 end = side ? layer->start + side->packed + side->tail : f->start;
    f->end = end > f->end ? end : f->end;
  }
  need(r, !data.data || differs, "container-39", "layer-positions has one start only");
}

static void read_state(kv_file *f, const u8 *record, kv_state *state) {
  kv_reader *r = f->r;
  kv_tensor *t = state->tensor = take(r, 1, sizeof *t);
  u32 length = 0;
  state->layer = (u32)little(record, 2);
  t->dtype = record[2];
  t->rank = record[3];
  bool right = record[2] <= F32 && t->rank >= 1 && t->rank <= 8;
  for (u32 i = 0; i < 8; i++) {
    t->shape[i] = little(record + 4 + 8 * i, 8);
    right = right && (t->shape[i] > 0) == (i < t->rank);
  }
  while (length < 28 && record[68 + length]) length++;
  memcpy(state->name, record + 68, length);
  for (u32 i = 0; i < 28; i++) {
    const char *set = i ? "abcdefghijklmnopqrstuvwxyz0123456789_." : "abcdefghijklmnopqrstuvwxyz";
    right = right && (i < length ? strchr(set, record[68 + i]) != NULL : !record[68 + i]);
  }
  need(r, right && length, "container-43", "a record of layer-state has another form");
  for (u32 i = 0; i < t->rank; i++) limit(r, "a size of a state", t->shape[i], i ? MAX_TOKENS : 65536);
  need(r, state->layer < f->layer_count, "container-44", "there is no layer %u", state->layer);
}

static void read_states(kv_file *f) {
  kv_reader *r = f->r;
  kv_bytes data = records(f, "layer-state", 96, "container-41", "container-42");
  f->state_count = (u32)(data.size / 96);
  f->states = take(r, f->state_count, sizeof *f->states);
  for (u32 i = 0; i < f->state_count; i++) {
    kv_state *state = &f->states[i], *before = state - 1;
    read_state(f, data.data + 96 * i, state);
    bool same = i && before->layer == state->layer;
    bool ascends = !i || (same ? strcmp(before->name, state->name) < 0 : before->layer < state->layer);
    need(r, ascends, "container-45", "the records of layer-state do not ascend");
    bool right = !same || before->tensor->shape[0] == state->tensor->shape[0];
    for (int which = 0; which < 2; which++) {
      const kv_side *side = f->layers[state->layer].sides[which];
      right = right && (!side || side->batch == state->tensor->shape[0]);
    }
    need(r, right, "container-46", "the states of layer %u differ in sequences", state->layer);
  }
}

static void count_sequences(kv_file *f) {
  f->fewest = UINT64_MAX;
  for (u32 i = 0; i < f->side_count + f->state_count; i++) {
    u64 own = i < f->side_count ? f->sides[i]->batch : f->states[i - f->side_count].tensor->shape[0];
    f->fewest = own < f->fewest ? own : f->fewest;
    f->most = own > f->most ? own : f->most;
  }
}

static void read_hidden(kv_file *f) {
  kv_bytes data = records(f, "hidden-tokens", 20, "container-49", "container-50");
  for (u64 at = 0; at < data.size; at += 20) {
    const u8 *record = data.data + at;
    u64 sequence = little(record, 4), first = little(record + 4, 8), end = little(record + 12, 8);
    need(f->r, sequence < f->fewest, "container-51", "there is no sequence %llu", sequence);
    bool within = first < end && first >= f->start && end <= f->end, ascends = true;
    need(f->r, within, "container-52", "a stretch of hidden tokens is not within the range");
    if (at) {
      u64 last = little(record - 20, 4), last_end = little(record - 8, 8);
      ascends = last < sequence || (last == sequence && last_end < first);
    }
    need(f->r, ascends, "container-53", "the stretches of hidden tokens do not ascend");
  }
}

static void read_offsets(kv_file *f) {
  kv_bytes data = records(f, "position-offsets", 8, "container-56", "container-57");
  u64 count = data.size / 8;
  bool one = !f->most || (f->fewest == count && f->most == count);
  need(f->r, !count || one, "container-58", "there are %llu offsets", count);
  for (u64 i = 0; i < count; i++) {
    u64 offset = little(data.data + 8 * i, 8);
    bool negative = offset >> 63;
    need(f->r, !negative || 0 - offset <= f->end, "container-59", "a position after the range is negative");
    limit(f->r, "an offset", negative ? 0 : offset, MAX_TOKENS);
    limit(f->r, "a position after the range", f->end + offset, MAX_TOKENS);
  }
}

static void plan_all(kv_file *f) {
  u32 state = 0, side = 0;
  u64 most = f->r->page ? 2 * MAX_STREAMS * f->layer_count : f->listed->number;
  f->tensors = take(f->r, most, sizeof *f->tensors);
  for (u32 l = 0; l < f->layer_count; l++) {
    while (side < f->side_count && f->sides[side]->layer == l) plan_side(f, f->sides[side++]);
    for (; state < f->state_count && f->states[state].layer == l; state++) {
      kv_state *s = &f->states[state];
      char name[56];
      snprintf(name, sizeof name, "%u.state.%s", l, s->name);
      s->tensor = plan(f, name, s->tensor->dtype, s->tensor->rank, s->tensor->shape);
      s->tensor->any = true;
    }
  }
  bool all = f->r->page || f->tensor_count == f->listed->number;
  need(f->r, all, "container-16", "there are %llu tensors, not %llu", f->tensor_count, f->listed->number);
}

static void read_header(kv_file *f, const kv_value *map) {
  kv_reader *r = f->r;
  kv_cursor c = {r, map, 0, "container-11", "container-11"};
  need(r, map->type == MAP, "container-11", "the header is not a map");
  integer(&c, "format", 1, 1);
  f->required = many(&c, "required", ARRAY, STRING);
  limit(r, "the number of required features", f->required->number, 256);
  for (u64 i = 1; i < f->required->number; i++) {
    bool ascends = compare(f->required->items[i - 1].bytes, f->required->items[i].bytes) < 0;
    need(r, ascends, "container-34", "required features do not ascend");
  }
  f->ignorable = many(&c, "ignorable", MAP, BINARY);
  f->model = many(&c, "model", MAP, STRING);
  f->recipe = next_value(&c, "recipe", STRING)->bytes;
  f->start = limited(&c, "start", 0, MAX_TOKENS);
  const kv_value *codecs = many(&c, "codecs", ARRAY, MAP);
  limit(r, "the number of codecs", codecs->number, 4096);
  f->codec_count = (u32)codecs->number;
  f->codecs = take(r, codecs->number, sizeof *f->codecs);
  for (u32 i = 0; i < f->codec_count; i++) read_codec(r, &codecs->items[i], &f->codecs[i]);
  read_layers(f, &c);
  f->listed = next_value(&c, "tensors", ARRAY);
  end_map(&c);
  bool empty = !f->model->number && !f->start && !f->listed->number;
  need(r, !r->page || empty, "row-3", "a description has a model, a start or tensors");
  check_codec_features(f);
  read_starts(f);
  read_states(f);
  count_sequences(f);
  read_hidden(f);
  read_offsets(f);
  f->checksums = feature(f, "zstd-checksum").data != NULL;
  if (r->page) return;
  plan_all(f);
  f->basis = required(f, "basis");
  if (f->basis) check_basis_header(f);
}
