/* Packed pages of serving engines (row.md). */
static void check_zeros(kv_reader *r, const u8 *data, u64 from, u64 to) {
  for (; from < to; from++) need(r, !data[from], "row-3", "byte %llu of the packed page is not zero", from);
}
static bool is_page(kv_bytes bytes) { return begins(bytes.data, bytes.size, "kvpack-row "); }
/* Checks the restrictions of a description that container.md does not have. */
static void check_description(kv_file *f) {
  static const char known[] = "balanced|key-mean|log-norms|raw-positions|token-scale-per-head";
  kv_reader *r = f->r;
  kv_bytes dtype = feature(f, "page-dtype");
  for (u64 i = 0; i < f->required->number; i++)
    need(r, word_of(f->required->items[i].bytes, known) >= 0, "row-3", "a feature is not of pages");
  bool right = word_of(dtype, "bf16|fp16|fp32|fp8_e4m3|fp8_e5m2|u8") >= 0 && f->ignorable->number == 1;
  need(r, right, "row-3", "the ignorable features of a description are not page-dtype alone");
  const kv_side *first = f->side_count ? f->sides[0] : NULL;
  bool values = first && f->layers[0].sides[1];
  for (u32 l = 0; l < f->layer_count; l++)
    right = right && f->layers[l].sides[0] && !f->layers[l].sides[1] == !values;
  need(r, right && first, "row-3", "the layers of a packed page do not have the same sides");
  for (u32 i = 0; i < f->side_count; i++) {
    const kv_side *s = f->sides[i];
    const kv_codec *c = s->codec;
    right = s->batch == 1 && s->run_count == 1 && !s->tail && !s->window && s->heads == first->heads;
    right = right && s->packed == first->packed;
    need(r, right, "row-3", "a side of layer %u has a shape that packed pages do not have", s->layer);
    bool items = has(c, OUTLIERS) || has(c, TOKENS) || c->id == LOSSLESS || c->id == TRANSFORM;
    need(r, !items, "row-3", "a side of layer %u has a stream of items", s->layer);
    need(r, !is(dtype, "u8") || c->id == OPAQUE, "row-6", "a side of a page of bytes is not opaque");
  }
}

kv_file *kv_open_page(kv_reader *r, kv_bytes bytes) {
  need(r, bytes.size >= 128, "row-1:size", "there are %llu bytes of a packed page", bytes.size);
  need(r, is_page(bytes), "row-1:magic", "the bytes do not begin as a packed page does");
  need(r, !memcmp(bytes.data + 11, "1\n\0\0", 5), "row-1:version", "the page is of a later version");
  u64 length = little(bytes.data + 16, 8), sum = 0;
  bool right = length >= 128 && length >> 32 == 0 && length % 64 == 0;
  need(r, right, "row-2", "a packed page cannot have %llu bytes", length);
  need(r, length <= bytes.size, "row-2:cut", "the packed page of %llu bytes is cut short", length);
  for (u64 i = 0; i < length; i += 4)
    sum = sum * 0x9e3779b97f4a7c15u + (i == 24 || i == 28 ? 0 : little(bytes.data + i, 4));
  need(r, sum == little(bytes.data + 24, 8), "row-4", "the packed page does not have its checksum");
  kv_bytes page = {bytes.data, length};
  u64 size = little(page.data + 96, 4), at = 128 + aligned(size, 64);
  check_zeros(r, page.data, 100, 128);
  need(r, at <= page.size, "row-3", "the description does not end within the packed page");
  kv_file *f = take(r, 1, sizeof *f);
  *f = (kv_file){.r = r, .bytes = page, .header = {page.data + 128, size}};
  r->page = true;
  read_header(f);
  check_description(f);
  plan_all(f);
  r->page = false;
  check_zeros(r, page.data, 128 + size, at);
  for (kv_tensor *t = f->tensors; t < f->tensors + f->tensor_count; t++) {
    u64 end = plus(at, t->bytes);
    need(r, end <= page.size && aligned(end, 64) <= page.size, "row-2", "the page ends within %s", t->name);
    t->data = page.data + at;
    at = aligned(end, 64);
    check_zeros(r, page.data, end, at);
  }
  need(r, at == page.size, "row-2", "the packed page has bytes after its last padding");
  return f;
}
