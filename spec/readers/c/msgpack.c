/* The msgpack profile of headers (container.md), and the search for what is new in a header. */
static const char codec_names[] = "angle|group|klt|lossless|minifloat|octahedral|opaque|polar|quaternion|"
                                  "raw|scalar|transform|trellis";
/* The heads from 0xc0 to 0xdf: types (e, f, j, p and x do not occur in headers) and bytes of the number. */
static const char types[] = "nxxxbbbeeeffiiiijjjjpppppsssaamm";
static const char widths[] = "00001241240012481248000001242424";
/* Read a value without items; false if it is cut short. Its head is the shortest form from `least` on. */
static bool read_value(kv_bytes *rest, kv_value *v, u64 *least) {
  *v = (kv_value){.type = 'x'};
  *least = 0;
  if (!rest->size) return false;
  u8 head = *cut(rest, 1).data, code = head - 0xc0;
  if (head >= 0xe0) return true;
  if (head < 0xc0) {
    v->type = head < 0x80 ? INTEGER : head < 0x90 ? MAP : head < 0xa0 ? ARRAY : STRING;
    v->number = head < 0x80 ? head : head & (head < 0xa0 ? 15 : 31);
  } else {
    u32 width = widths[code] - '0';
    v->type = types[code];
    if (rest->size < width) return false;
    v->number = v->type == 'f' ? 4u << (head & 1) : v->type == 'p' ? 1 + (1u << (head - 0xd4)) : 0;
    if (width) v->number = big(cut(rest, width).data, width) + (v->type == 'e');
    if (v->type == 'j' && v->number >> (8 * width - 1)) v->number = 0; /* below 0 */
    if (width > 1) *least = width == 8 ? (u64)1 << 32 : width == 4 ? 65536 : 256;
    if (width == 1) *least = v->type == INTEGER ? 128 : v->type == STRING ? 32 : 0;
    if (width == 2 && (v->type == ARRAY || v->type == MAP)) *least = 16;
  }
  if (!strchr("befps", v->type)) return true;
  if (rest->size < v->number) return false;
  v->bytes = cut(rest, v->number);
  return true;
}

static u64 items_of(const kv_value *v) { return v->number * (2 * (v->type == MAP) + (v->type == ARRAY)); }

static void parse(kv_reader *r, kv_bytes *rest, kv_value *v, int open) {
  u64 least;
  bool whole = read_value(rest, v, &least);
  need(r, v->number >= least, "container-10", "a number of the header does not have its shortest form");
  need(r, !whole || strchr("abimns", v->type), "container-10", "a type of msgpack does not occur in headers");
  u64 limit = v->type == STRING ? 4096 : v->type == BINARY ? 65536 : v->type == MAP ? 256 : 131072;
  need(r, v->type == INTEGER || v->number <= limit, "container-29", "a value has a size of %llu", v->number);
  need(r, whole, "container-10", "the header is cut short");
  need(r, v->type != STRING || is_utf8(v->bytes), "container-10", "a string is not UTF-8");
  if (v->type != ARRAY && v->type != MAP) return;
  need(r, open < 5, "container-10", "more than five maps and arrays are open");
  need(r, items_of(v) <= rest->size, "container-10", "the header is cut short");
  v->items = take(r, items_of(v), sizeof *v);
  for (u64 i = 0; i < items_of(v); i++) {
    parse(r, rest, &v->items[i], open + 1);
    bool key = v->type == MAP && i % 2 == 0;
    need(r, !key || v->items[i].type == STRING, "container-10", "a map key is not a string");
    for (u64 k = 0; key && k < i; k += 2)
      need(r, compare(v->items[k].bytes, v->items[i].bytes), "container-10", "a map key occurs twice");
  }
}
/* Take a value in any form of msgpack; false if its head or bytes are cut short. The items
 * begin at `within`; if they are cut short, `rest` becomes NULL. */
static bool read_loose(kv_bytes *rest, kv_value *v, kv_bytes *within) {
  u64 least;
  kv_value item;
  bool whole = read_value(rest, v, &least);
  if (v->type == 'j') v->type = INTEGER;
  *within = *rest;
  for (u64 left = whole ? items_of(v) : 0; left; left += items_of(&item) - 1)
    if (!read_value(rest, &item, &least)) {
      *rest = (kv_bytes){NULL, 0};
      break;
    }
  return whole;
}

static bool is_string(kv_value v, const char *of) { return v.type == STRING && word_of(v.bytes, of) >= 0; }
/* Refuses a name that is not among the known names. */
static void know(kv_reader *r, bool known, const char *rule, kv_bytes name) {
  int shown = name.size < 100 ? (int)name.size : 100;
  need(r, known, rule, "the file needs what is not known: %.*s", shown, (const char *)name.data);
}
/* Refuses files of a later version, before any other error is reported (rule container-69). */
static void look_for_new(kv_reader *r, kv_bytes bytes) {
  static const char known[] = "balanced|basis|hidden-tokens|key-mean|layer-positions|layer-state|log-norms|"
                              "position-offsets|raw-positions|token-scale-per-head";
  kv_value map, key, value, found[3] = {{0}};
  kv_bytes members, within, places[3];
  if (!read_loose(&bytes, &map, &members) || map.type != MAP) return;
  for (u64 left = map.number; left && read_loose(&members, &key, &within); left--) {
    if (!read_loose(&members, &value, &within)) break;
    int which = key.type == STRING ? word_of(key.bytes, "format|required|codecs") : -1;
    if (which < 0 || found[which].type) continue;
    places[which] = within;
    found[which] = value;
  }
  need(r, found[0].type != INTEGER || found[0].number <= 1, "container-32", "a later version wrote the file");
  for (u64 left = found[1].type == ARRAY ? found[1].number : 0; left; left--) {
    if (!read_loose(&places[1], &value, &within)) break;
    know(r, value.type != STRING || is_string(value, known), "container-7", value.bytes);
  }
  for (u64 left = found[2].type == ARRAY ? found[2].number : 0; left; left--) {
    bool right = read_loose(&places[2], &value, &members) && places[2].data, named = false;
    for (u64 i = right && value.type == MAP ? value.number : 0; i && !named; i--) {
      read_loose(&members, &key, &within);
      named = is_string(key, "id");
      read_loose(&members, &key, &within);
      bool exists = key.type != STRING || (is_string(key, codec_names) && !is_string(key, "opaque"));
      know(r, !named || exists, "container-12", key.bytes);
    }
    if (!right) break;
  }
}
