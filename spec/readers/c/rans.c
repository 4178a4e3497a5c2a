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

/* The first states of the lanes, which must be high enough. */
static void read_lanes(kv_reader *r, const segment *s, u32 lanes[32]) {
  for (int i = 0; i < 32; i++) {
    lanes[i] = (u32)little(s->states->data + 128 * s->number + 4 * i, 4);
    need(r, lanes[i] >= 65536, "rans-2", "a first state is %u", lanes[i]);
  }
}
/* Go to the next segment in the order of words; false after the last. */
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
/* Decode a segment with a coder for every `tokens` symbols; returns the bytes of words it took. */
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
