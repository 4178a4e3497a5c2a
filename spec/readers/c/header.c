/* The fields of the header, its features, and the plan of tensors that follows from them (container.md). */
static void limit(kv_reader *r, const char *what, u64 number, u64 most) {
  need(r, number <= most, "container-29", "%s is %llu, above the limit %llu", what, number, most);
}
/* Reads an integer that has a limit in container.md. */
static u64 limited(kv_cursor *c, const char *key, u64 low, u64 most) {
  u64 number = integer(c, key, low, UINT64_MAX);
  limit(c->r, key, number, most);
  return number;
}
/* An array of values of one type, or a map to them whose keys ascend, which is why none occurs twice. */
static const kv_value *many(kv_cursor *m, const char *key, char type, char of) {
  const kv_value *found = next_value(m, key, type), *items = found->items;
  u64 each = type == MAP ? 2 : 1;
  for (u64 i = 0; i < each * found->number; i += each) {
    need(m->r, items[i + each - 1].type == of, m->values, "a member of %s has another type", key);
    bool ascends = type != MAP || !i || compare(items[i - 2].bytes, items[i].bytes) < 0;
    need(m->r, ascends, "container-10", "the members of %s do not ascend", key);
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
  side->tokens = plus(side->packed, side->tail);
  limit(r, "the number of tokens", side->tokens, MAX_TOKENS);
  side->tail_dtype = (const kv_dtype[]){BF16, F16, F32}[choice(&c, "tail_dtype", "bf16|fp16|fp32")];
  side->window = limited(&c, "window", 0, MAX_TOKENS);
  need(r, side->window % codec->group == 0, "container-15", "window is not a multiple of the token group");
  side->entries = key_is(&c, "entries") ? next_value(&c, "entries", MAP) : NULL;
  end_map(&c);
  bool single = runs->number < 2 || codec->group > 1 || rows_per_run(codec);
  need(r, single, "container-18", "a codec without token groups has several runs");
  need(r, !which || !has(codec, MEAN), "side-cars-14", "values have key_mean");
  need(r, !codec->by_head || side->heads == codec->heads, "klt-10", "there are widths of other heads");
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
    need(r, k->tokens == v->tokens, "container-14", "the sides of layer %u differ in tokens", l);
  }
}

static bool required(const kv_file *f, const char *name) {
  for (u64 i = 0; i < f->required->number; i++)
    if (is(f->required->items[i].bytes, name)) return true;
  return false;
}
/* Returns the bytes of a member of a map, or no data if it does not exist. */
static kv_bytes member(const kv_value *map, const char *name) {
  for (u64 i = 0; i < 2 * map->number; i += 2)
    if (is(map->items[i].bytes, name)) return map->items[i + 1].bytes;
  return (kv_bytes){NULL, 0};
}

static kv_bytes feature(const kv_file *f, const char *name) { return member(f->ignorable, name); }
/* Features that a file needs exactly if a codec has a sidecar, or what counts as one. */
static void check_codec_features(kv_file *f) {
  static const char *const features[][2] = {{"balanced", "container-63"}, {"key-mean", "container-62"},
      {"log-norms", "container-64"}, {"raw-positions", "container-55"},
      {"token-scale-per-head", "container-61"}};
  static const u32 cars[] = {BALANCED, MEAN, LOG_NORMS, POSITIONS, HEAD_SCALES};
  for (int i = 0; i < 5; i++) {
    bool found = false;
    for (u32 k = 0; k < f->codec_count; k++) found = found || has(&f->codecs[k], cars[i]);
    const char *name = features[i][0];
    need(f->r, required(f, name) == found, features[i][1], "%s is named or needed, not both", name);
  }
}
/* The data of a feature that has both a name and data, or neither: records of `size` bytes, or any for 0. */
static kv_bytes records(kv_file *f, const char *name, u64 size, const char *named, const char *sized) {
  kv_bytes data = feature(f, name);
  need(f->r, !data.data == !required(f, name), named, "%s has a name or data, not both", name);
  bool right = !size || !data.data || (data.size && data.size % size == 0);
  need(f->r, right, sized, "%s has %llu bytes", name, data.size);
  return data;
}

static kv_side *any_side(kv_side *const *sides) { return sides[0] ? sides[0] : sides[1]; }

static void read_starts(kv_file *f) {
  kv_bytes data = records(f, "layer-positions", 0, "container-35", "container-36");
  bool differs = false;
  need(f->r, !data.data || data.size == 8 * f->layer_count, "container-36", "a layer has no start");
  f->end = f->start;
  for (u32 l = 0; l < f->layer_count; l++) {
    const kv_side *side = any_side(f->layers[l].sides);
    u64 start = f->layers[l].start = data.data ? little(data.data + 8 * l, 8) : f->start;
    limit(f->r, "the start of a layer", start, MAX_TOKENS);
    need(f->r, start >= f->start, "container-37", "layer %u starts before the range", l);
    need(f->r, side || start == f->start, "container-38", "layer %u has no sides and a start", l);
    differs = differs || start != f->start;
    if (side && start + side->tokens > f->end) f->end = start + side->tokens;
  }
  need(f->r, !data.data || differs, "container-39", "layer-positions has one start only");
}
/* Read the states, and count sequences. */
static void read_states(kv_file *f) {
  static const u8 zeros[28];
  kv_bytes data = records(f, "layer-state", 96, "container-41", "container-42");
  f->states = take(f->r, data.size / 96, sizeof *f->states);
  for (; f->state_count < data.size / 96; f->state_count++) {
    kv_state *state = &f->states[f->state_count], *before = f->state_count ? state - 1 : NULL;
    const u8 *record = data.data + 96 * f->state_count;
    kv_tensor *t = state->tensor = take(f->r, 1, sizeof *t);
    state->layer = little(record, 2);
    t->dtype = record[2];
    t->rank = record[3];
    memcpy(state->name, record + 68, 28);
    u64 length = strspn(state->name, "abcdefghijklmnopqrstuvwxyz0123456789_.");
    bool right = t->dtype <= F32 && t->rank >= 1 && t->rank <= 8;
    right = right && *state->name >= 'a' && *state->name <= 'z';
    for (u32 i = 0; i < 8; i++) {
      t->shape[i] = little(record + 4 + 8 * i, 8);
      right = right && (t->shape[i] > 0) == (i < t->rank);
    }
    right = right && !memcmp(state->name + length, zeros, 28 - length);
    need(f->r, right, "container-43", "a record of layer-state has another form");
    for (u32 i = 0; i < t->rank; i++) limit(f->r, "a size of a state", t->shape[i], i ? MAX_TOKENS : 65536);
    need(f->r, state->layer < f->layer_count, "container-44", "there is no layer %u", state->layer);
    bool same = before && before->layer == state->layer;
    bool ascends = !before || (same ? strcmp(before->name, state->name) < 0 : before->layer < state->layer);
    need(f->r, ascends, "container-45", "the records of layer-state do not ascend");
    const kv_side *side = any_side(f->layers[state->layer].sides);
    right = (!same || before->tensor->shape[0] == t->shape[0]) && (!side || side->batch == t->shape[0]);
    need(f->r, right, "container-46", "the states of layer %u differ in sequences", state->layer);
  }
  for (u32 i = 0; i < f->side_count + f->state_count; i++) {
    u64 own = i < f->side_count ? f->sides[i]->batch : f->states[i - f->side_count].tensor->shape[0];
    f->fewest = i && f->fewest < own ? f->fewest : own;
    f->most = own > f->most ? own : f->most;
  }
}

static void read_hidden_and_offsets(kv_file *f) {
  kv_bytes data = records(f, "hidden-tokens", 20, "container-49", "container-50");
  u64 last = 0, last_end = 0;
  for (const u8 *record = data.data; data.size; record += 20, data.size -= 20) {
    u64 sequence = little(record, 4), first = little(record + 4, 8), end = little(record + 12, 8);
    need(f->r, sequence < f->fewest, "container-51", "there is no sequence %llu", sequence);
    bool within = first < end && first >= f->start && end <= f->end;
    need(f->r, within, "container-52", "a stretch of hidden tokens is not within the range");
    bool ascends = !last_end || last < sequence || (last == sequence && last_end < first);
    need(f->r, ascends, "container-53", "the stretches of hidden tokens do not ascend");
    last = sequence;
    last_end = end;
  }
  data = records(f, "position-offsets", 8, "container-56", "container-57");
  bool right = !data.size || !f->most || (f->fewest == data.size / 8 && f->most == data.size / 8);
  need(f->r, right, "container-58", "there are %llu offsets", data.size / 8);
  for (u64 i = 0; i < data.size; i += 8) {
    u64 offset = little(data.data + i, 8), back = offset >> 63 ? 0 - offset : 0;
    need(f->r, back <= f->end, "container-59", "a position after the range is negative");
    limit(f->r, "an offset", back ? 0 : offset, MAX_TOKENS);
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
  need(f->r, f->r->page || f->tensor_count == f->listed->number, "container-16", "a tensor is not planned");
}

static void read_header(kv_file *f) {
  kv_reader *r = f->r;
  kv_bytes rest = f->header;
  kv_value map;
  kv_cursor c = {r, &map, 0, "container-11", "container-11"};
  parse(r, &rest, &map, 0);
  need(r, !rest.size, "container-10", "bytes follow the header");
  need(r, map.type == MAP, "container-10", "the header is not a map");
  integer(&c, "format", 1, 1);
  f->required = many(&c, "required", ARRAY, STRING);
  limit(r, "the number of required features", f->required->number, 256);
  for (const kv_value *v = f->required->items; v + 1 < f->required->items + f->required->number; v++)
    need(r, compare(v->bytes, v[1].bytes) < 0, "container-34", "required features do not ascend");
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
  need(r, !r->page || empty, "row-3", "a description has too much");
  check_codec_features(f);
  read_starts(f);
  read_states(f);
  read_hidden_and_offsets(f);
  f->checksums = feature(f, "zstd-checksum").data != NULL;
  if (r->page) return;
  plan_all(f);
  f->basis = required(f, "basis");
  if (f->basis) check_basis_header(f);
}
