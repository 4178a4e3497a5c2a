// Attention of up to four query rows over tokens of the codec scalar: ``attend.split`` for head dim 128, with 2 to 4 bits.
//
// Compile-time constants: BITS, K_NORM_BITS, V_NORM_BITS, MEAN_BITS (0 without means), MEAN_SHIFT (log2 of a page's tokens), WARPS, BLOCKS
// (per multiprocessor), STAGES.
//
// A warp attends 16 tokens at a time: it copies their rows to shared memory some tiles ahead, and looks values up in a table with one copy
// for each lane. The address of an entry is a byte of a word, followed by the byte of the lane, so one byte permute computes it. An entry
// has two fields of a column, or four with 2 bits, and is used as it is in registers of first operands of products. The columns of second
// operands are the query rows twice: once for the first and once for the second field, or pair of fields.

typedef unsigned u32;
typedef unsigned short u16;
typedef long long i64;

#define DIM 128
#define ROWS 4
#define TOKENS 16
#define WIDTH (BITS == 4 ? 32 : 16)
#define FIELDS (DIM / WIDTH)
#define ROW_BYTES (2 * WIDTH)
#define TAIL_BYTES (BITS == 3 ? WIDTH : 0)
#define SIDE_BYTES (TOKENS * (ROW_BYTES + TAIL_BYTES))
#define STAGE_BYTES (2 * SIDE_BYTES)
#define STREAMS (BITS == 3 ? 3 : 2)
#define WORK_ROW (6 + 3 * (2 * STREAMS + (MEAN_BITS ? 2 : 0)))
#define STEP (WARPS * TOKENS)
#define LEVELS 16
#define CONSTANTS (LEVELS + 2 * DIM)

// Shared memory: the table, the warps' tiles and factors, constants, the query in float16, and its products with page means.
#define ENTRY_BYTES 256
#define TABLE_BYTES (256 * ENTRY_BYTES)
#define WARP_BYTES (STAGES * STAGE_BYTES + TOKENS * 16)
#define CONSTANTS_AT (TABLE_BYTES + WARPS * WARP_BYTES)
#define QUERY_AT (CONSTANTS_AT + CONSTANTS * 2)
#define PRODUCTS_AT (QUERY_AT + ROWS * DIM * 2)

// Sums are rescaled only when a score is 2^MARGIN times as large as the largest at the last time, so weights fit in float16.
#define MARGIN 8.0f
#define NO_SCORE -1.0e30f
#define INFINITE __int_as_float(0x7F800000)

struct Arguments {
  float *sums, *largest, *total;
  const float *q, *scales;
  const u16* mean_q;
  const i64* work;
  const u16* constants;
  const int* lengths;
  int items, heads, rows, padded, first_part, parts, columns, key_columns, max_length, has_lengths, first;
};

#ifndef KVPACK_HOST
#define DEVICE static __device__ __forceinline__
// Dynamic shared memory begins after the bytes that CUDA reserves. As a constant, its address is part of instructions.
#define SHARED_BASE 1024
extern __shared__ __align__(256) char shared[];

DEVICE u32 permute(u32 a, u32 b, u32 select) { u32 d; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(select)); return d; }
DEVICE float exp2_of(float x) { float d; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x)); return d; }
DEVICE float log2_of(float x) { float d; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x)); return d; }
DEVICE u32 pack_half(float a, float b) { u32 d; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(b), "f"(a)); return d; }
DEVICE float from_half(u32 x) { float d; asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(d) : "r"(x)); return d; }
DEVICE u32 get(u32 at) { u32 d; asm volatile("ld.shared.b32 %0, [%1 + %2];" : "=r"(d) : "r"(at), "n"(SHARED_BASE)); return d; }
DEVICE u32 get_half(u32 at) { u32 d; asm volatile("{ .reg .b16 h; ld.shared.b16 h, [%1 + %2]; cvt.u32.u16 %0, h; }" : "=r"(d) : "r"(at), "n"(SHARED_BASE)); return d; }
DEVICE uint2 get2(u32 at) { uint2 d; asm volatile("ld.shared.v2.b32 {%0, %1}, [%2 + %3];" : "=r"(d.x), "=r"(d.y) : "r"(at), "n"(SHARED_BASE)); return d; }
DEVICE uint4 get4(u32 at) {
  uint4 d;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4 + %5];" : "=r"(d.x), "=r"(d.y), "=r"(d.z), "=r"(d.w) : "r"(at), "n"(SHARED_BASE));
  return d;
}
// The table never changes, so these loads may move.
DEVICE u32 look_up(u32 at) { u32 d; asm("ld.shared.b32 %0, [%1 + %2];" : "=r"(d) : "r"(at), "n"(SHARED_BASE)); return d; }
DEVICE u32 look_up_upper(u32 at) { u32 d; asm("ld.shared.b32 %0, [%1 + %2];" : "=r"(d) : "r"(at), "n"(SHARED_BASE + 128)); return d; }
DEVICE uint2 look_up_four(u32 at) { uint2 d; asm("ld.shared.v2.b32 {%0, %1}, [%2 + %3];" : "=r"(d.x), "=r"(d.y) : "r"(at), "n"(SHARED_BASE)); return d; }
DEVICE void put(u32 at, float x) { asm volatile("st.shared.f32 [%0 + %1], %2;" :: "r"(at), "n"(SHARED_BASE), "f"(x) : "memory"); }
DEVICE void put_half(u32 at, u32 x) { asm volatile("{ .reg .b16 h; cvt.u16.u32 h, %2; st.shared.b16 [%0 + %1], h; }" :: "r"(at), "n"(SHARED_BASE), "r"(x) : "memory"); }
DEVICE void put2(u32 at, float x, float y) { asm volatile("st.shared.v2.f32 [%0 + %1], {%2, %3};" :: "r"(at), "n"(SHARED_BASE), "f"(x), "f"(y) : "memory"); }
DEVICE void put4(u32 at, u32 x, u32 y) { asm volatile("st.shared.v4.b32 [%0 + %1], {%2, %3, %2, %3};" :: "r"(at), "n"(SHARED_BASE), "r"(x), "r"(y) : "memory"); }
DEVICE u32 load8(const char* p) { u32 d; asm("{ .reg .b16 h; ld.global.nc.u8 h, [%1]; cvt.u32.u16 %0, h; }" : "=r"(d) : "l"(p)); return d; }
DEVICE u32 load16(const char* p) { u32 d; asm("{ .reg .b16 h; ld.global.nc.u16 h, [%1]; cvt.u32.u16 %0, h; }" : "=r"(d) : "l"(p)); return d; }
DEVICE void copy16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %1], [%2], 16;" :: "r"(to), "n"(SHARED_BASE), "l"(from) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
DEVICE void wait_for_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory"); }
DEVICE void load_matrices4(u32* d, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4 + %5];" : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(at), "n"(SHARED_BASE) : "memory");
}
DEVICE void load_matrices2(u32* d, u32 at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2 + %3];" : "=r"(d[0]), "=r"(d[1]) : "r"(at), "n"(SHARED_BASE) : "memory");
}
DEVICE u32 transpose(u32 x) { u32 d; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(x)); return d; }
DEVICE void multiply(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE float exchange(float x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
DEVICE u32 exchange_word(u32 x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
DEVICE bool in_any_lane(bool x) { return __any_sync(0xFFFFFFFFu, x); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE void sync() { __syncthreads(); }
DEVICE void wait_for_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void check_base() {
  if ((u32)__cvta_generic_to_shared(shared) != SHARED_BASE) __trap();
}
// Without these, the compiler would compute such numbers again in every iteration.
DEVICE void keep(u32& x) { asm volatile("" : "+r"(x)); }
DEVICE void keep(float& x) { asm volatile("" : "+f"(x)); }
#define KERNEL extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
#endif

// Pairs of neighboring fields of the columns, or of the tokens, of the two words in a register.
struct Decoded { u32 low[FIELDS / 2], high[FIELDS / 2]; };

#define ENTRY_OF(word, byte) permute(word, lane_bytes, 0x5504u | (byte) << 4)

// ``tail`` contains the upper bytes of columns with 3 bits, and ``select`` joins them with the upper bytes of words.
DEVICE Decoded decode(u32 words, u32 tail, u32 select, u32 lane_bytes) {
  Decoded d;
  if constexpr (BITS == 2) {
    const uint2 a = look_up_four(ENTRY_OF(words, 0)), b = look_up_four(ENTRY_OF(words, 1));
    const uint2 x = look_up_four(ENTRY_OF(words, 2)), y = look_up_four(ENTRY_OF(words, 3));
    d.low[0] = a.x, d.low[1] = a.y, d.low[FIELDS / 2 - 2] = b.x, d.low[FIELDS / 2 - 1] = b.y;
    d.high[0] = x.x, d.high[1] = x.y, d.high[FIELDS / 2 - 2] = y.x, d.high[FIELDS / 2 - 1] = y.y;
  } else if constexpr (BITS == 4) {
    d.low[0] = look_up(ENTRY_OF(words, 0)), d.low[1] = look_up(ENTRY_OF(words, 1));
    d.high[0] = look_up(ENTRY_OF(words, 2)), d.high[1] = look_up(ENTRY_OF(words, 3));
  } else {
    // Pairs have 6 bits: the first three begin at bit 0 of a byte, and the last one ends at bit 7.
    const u32 upper = permute(words, tail, select), second = words >> 6, third = upper >> 4;
    d.low[0] = look_up(ENTRY_OF(words, 0)), d.high[0] = look_up(ENTRY_OF(words, 2));
    d.low[1] = look_up(ENTRY_OF(second, 0)), d.high[1] = look_up(ENTRY_OF(second, 2));
    d.low[FIELDS / 2 - 2] = look_up(ENTRY_OF(third, 0)), d.high[FIELDS / 2 - 2] = look_up(ENTRY_OF(third, 2));
    d.low[FIELDS / 2 - 1] = look_up_upper(ENTRY_OF(upper, 1)), d.high[FIELDS / 2 - 1] = look_up_upper(ENTRY_OF(upper, 3));
  }
  return d;
}

// Offset of 16 bytes in a tile of rows, swizzled so that the rows of a matrix are in different banks.
DEVICE u32 chunk_at(u32 row, u32 chunk) {
  return row * ROW_BYTES + ((chunk ^ (BITS == 4 ? row >> 1 & 3 : row >> 2 & 1)) << 4);
}

DEVICE u32 level_pair(u32 codes) {
  const u32 mask = (1u << BITS) - 1;
  return get_half(CONSTANTS_AT + (codes & mask) * 2) | get_half(CONSTANTS_AT + (codes >> BITS & mask) * 2) << 16;
}

DEVICE void fill_table(int thread) {
  for (u32 entry = thread; entry < 256; entry += WARPS * 32) {
    const u32 low = level_pair(entry), high = BITS == 2 ? level_pair(entry >> 4) : low, upper = BITS == 3 ? level_pair(entry >> 2) : 0;
    // Neighboring threads begin with different banks.
    for (u32 i = 0; i < (BITS == 3 ? 16 : 8); i++) {
      const u32 at = i + thread & (BITS == 3 ? 15 : 7);
      put4(entry * ENTRY_BYTES + at * 16, at < 8 ? low : upper, at < 8 ? high : upper);
    }
  }
}

// Store the products of the query rows and the means of ``pages`` pages.
DEVICE void multiply_means(const Arguments& arg, const char* codes, const char* scales, int pages, int sequence, int warp, int lane) {
  const u16* q = arg.mean_q + (i64)sequence * 2 * arg.padded * DIM;
  float query[ROWS][4];
  for (int row = 0; row < ROWS; row++)
    for (int i = 0; i < 4; i++) {
      // A byte with 4-bit codes has a channel of the first half and one of the second.
      const int channel = MEAN_BITS == 8 ? lane * 4 + i : lane * 2 + (i & 1) + (i >> 1) * (DIM / 2);
      query[row][i] = from_half(q[row * DIM + channel]) + from_half(q[(arg.padded + row) * DIM + channel]);
    }
  for (int page = warp; page < pages; page += WARPS) {
    float code[4];
    for (int i = 0; i < 4; i++) {
      const u32 byte = load8(codes + (MEAN_BITS == 8 ? page * DIM + lane * 4 + i : page * (DIM / 2) + lane * 2 + (i & 1)));
      code[i] = MEAN_BITS == 8 ? (float)((int)byte - 128) : (float)((int)(byte >> 4 * (i >> 1) & 15) - 8);
    }
    const float scale = from_half(load16(scales + page * 2));
    for (int row = 0; row < ROWS; row++) {
      float sum = query[row][0] * code[0] + query[row][1] * code[1] + query[row][2] * code[2] + query[row][3] * code[3];
      for (int step = 16; step; step >>= 1) sum += exchange(sum, step);
      if (lane == 0) put(PRODUCTS_AT + (page * ROWS + row) * 4, sum * scale);
    }
  }
}

KERNEL attend_scalar(const Arguments arg) {
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
  const int item = blockIdx.x % arg.items, sequence = blockIdx.x / arg.items;
  const i64 batch = sequence / arg.heads, head = sequence % arg.heads;
  check_base();
  if (!arg.first) launch_dependents();
  for (int i = thread; i < CONSTANTS; i += WARPS * 32) put_half(CONSTANTS_AT + i * 2, arg.constants[i]);
  const i64* work = arg.work + item * WORK_ROW;
  i64 tokens = work[1];
  if (arg.has_lengths) {
    const i64 left = (arg.lengths[batch] < arg.max_length ? arg.lengths[batch] : arg.max_length) - work[0];
    tokens = left < 0 ? 0 : left < tokens ? left : tokens;
  }
  const int count = (int)tokens;
  auto stream = [&](int number) { return (const char*)(work[6 + 3 * number] + batch * work[7 + 3 * number] + head * work[8 + 3 * number]); };

  // A lane copies 16 bytes of the rows of both sides and, with 3 bits, of the upper bytes of one side, and loads the norm of one token.
  const u32 own = TABLE_BYTES + warp * WARP_BYTES, factors = own + STAGES * STAGE_BYTES;
  const bool is_v = lane >= 16;
  const int token = lane & 15, row = lane * 16 / ROW_BYTES, begin = warp * TOKENS, norm_bits = is_v ? V_NORM_BITS : K_NORM_BITS;
  const i64 k_first = work[3] + begin, v_first = work[4] + begin, first = is_v ? v_first : k_first;
  const char* k_rows = stream(0) + k_first * ROW_BYTES + lane * 16;
  const char* v_rows = stream(STREAMS) + v_first * ROW_BYTES + lane * 16;
  const char* tails = stream(is_v ? STREAMS + 1 : 1) + first * TAIL_BYTES + token * 16;
  const char* norms = stream(is_v ? 2 * STREAMS - 1 : STREAMS - 1) + (first + token) * (norm_bits / 8);
  u32 row_to = own + chunk_at(row, lane % (ROW_BYTES / 16)), tail_to = own + (is_v ? SIDE_BYTES : 0) + TOKENS * ROW_BYTES + token * 16;
  const int row_count = count - row, token_count = count - token;
  auto load = [&](int at, u32 stage) {
    if (at < row_count) {
      copy16(row_to + stage, k_rows);
      copy16(row_to + stage + SIDE_BYTES, v_rows);
    }
    if (BITS == 4 && at + 8 < row_count) {
      copy16(row_to + stage + 8 * ROW_BYTES, k_rows + 8 * ROW_BYTES);
      copy16(row_to + stage + 8 * ROW_BYTES + SIDE_BYTES, v_rows + 8 * ROW_BYTES);
    }
    if (BITS == 3 && at < token_count) copy16(tail_to + stage, tails);
    commit_copies();
    k_rows += STEP * ROW_BYTES, v_rows += STEP * ROW_BYTES, tails += STEP * TAIL_BYTES;
  };
  auto load_norm = [&](int at) {
    u32 norm = 0;
    if (at < token_count) norm = norm_bits == 8 ? load8(norms) : load16(norms);
    norms += STEP * (norm_bits / 8);
    return norm;
  };
  for (int i = 0; i < STAGES - 1; i++) load(begin + i * STEP, i * STAGE_BYTES);
  u32 next_norm = load_norm(begin);
  sync();
  fill_table(thread);
  if (arg.first) {
    // Packed rows may be read before the wait, because they were written before the kernel that writes the queries began.
    wait_for_launch();
    launch_dependents();
  }
  for (int i = thread; i < ROWS * DIM; i += WARPS * 32) {
    const i64 column = (i64)sequence * arg.key_columns + get_half(CONSTANTS_AT + (LEVELS + i / ROWS) * 2);
    put_half(QUERY_AT + (i % ROWS * DIM + i / ROWS) * 2, pack_half(arg.q[column * arg.padded + i % ROWS], 0.0f));
  }
  const int own_row = 2 * t & 3;
  const float scale0 = arg.scales[sequence * arg.padded + own_row], scale1 = arg.scales[sequence * arg.padded + own_row + 1];
  int page_first = 0;
  if constexpr (MEAN_BITS > 0) {
    const i64 page = work[5] >> MEAN_SHIFT;
    page_first = (int)(work[5] - (page << MEAN_SHIFT));
    const int pages = count ? (page_first + count - 1 >> MEAN_SHIFT) + 1 : 0;
    multiply_means(arg, stream(2 * STREAMS) + page * (DIM * MEAN_BITS / 8), stream(2 * STREAMS + 1) + page * 2, pages, sequence, warp, lane);
  }
  sync();

  // Columns of products with keys: the query rows for the first pair of fields in half of an operand, and those for the second pair.
  u32 queries[4][2];
#pragma unroll
  for (int m = 0; m < 4; m++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int column = BITS == 4 ? 8 * t + 2 * m + i : 4 * t + m, field = (BITS == 4 ? 0 : 4 * i) + g / 4 * 2;
      const u32 at = QUERY_AT + ((g & 3) * DIM + field * WIDTH + column) * 2;
      queries[m][i] = get_half(at) | get_half(at + WIDTH * 2) << 16;
    }
  u32 products_at = PRODUCTS_AT + own_row * 4, factor_at = factors + (t < 2 ? g : g + 8) * 16, put_at = factors + token * 16 + is_v * 8;
  u32 lane_bytes = BITS == 2 ? token * 8 : lane * 4, matrix_row = lane & 7 | lane >> 1 & 8, matrix = lane >> 3 & 1;
  u32 k_at = own + (BITS == 4 ? chunk_at(g, t) : chunk_at(g, t >> 1) + (t & 1) * 8);
  u32 k_tail_at = own + TOKENS * ROW_BYTES + g * 16 + (t & 1) * 8, k_select = t < 2 ? 0x6341u : 0x7351u;
  u32 v_at = own + chunk_at(matrix_row, matrix), v_at2 = own + chunk_at(matrix_row, matrix + 2), v_tail_at = own + TOKENS * ROW_BYTES + token * 16;
  u32 first_select = g < 4 ? 0x4410u : 0x1044u, second_select = g < 4 ? 0x4432u : 0x3244u;
  // An 8-bit norm is a logarithm. Of values, it is added to scores with the opposite sign of its power's, and a norm of 0 is 2^-60.
  float log_step = is_v ? -0.0625f : 0.0625f, log_least = is_v ? 7.0625f : -7.0625f, log_zero = is_v ? 60.0f : -INFINITE;
  keep(factor_at), keep(put_at), keep(lane_bytes), keep(k_at), keep(v_at), keep(first_select), keep(second_select), keep(row_to);
  keep(log_step), keep(log_least), keep(log_zero);
  if (BITS == 3) keep(k_tail_at), keep(k_select), keep(v_tail_at), keep(tail_to);
  if (BITS == 4) keep(v_at2);
  if (MEAN_BITS) keep(products_at);

  float sums[4][4] = {}, largest0 = NO_SCORE, largest1 = NO_SCORE, limit0 = NO_SCORE, limit1 = NO_SCORE, total0 = 0.0f, total1 = 0.0f;
  u32 stage = 0;
#pragma unroll 1
  for (int at = begin; at < count; at += STEP) {
    // Of each token: the factor of its scores, minus the logarithm to add to them, and the power by which the total is multiplied.
    const u32 norm = next_norm;
    next_norm = load_norm(at + STEP);
    float log, power;
    if (norm_bits == 8) {
      log = norm ? (float)norm * log_step + log_least : log_zero;
      power = exp2_of(log);
    } else {
      const float value = from_half(norm);
      log = -fmaxf(log2_of(fabsf(value)), -60.0f);
      power = is_v ? copysignf(exp2_of(log), value) : value;
    }
    if (at >= token_count) log = INFINITE, power = 0.0f;
    put2(put_at, is_v ? log : power, power);
    wait_for_copies();
    sync_warp();
    load(at + (STAGES - 1) * STEP, stage == 0 ? (STAGES - 1) * STAGE_BYTES : stage - STAGE_BYTES);

    float scores[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if constexpr (BITS == 4) {
        const uint4 x = get4(k_at + stage + half * 8 * ROW_BYTES);
        const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const Decoded d = decode(words[i], 0, 0, lane_bytes);
          multiply(scores[half], d.low[0], d.low[1], d.high[0], d.high[1], queries[i][0], queries[i][1]);
        }
      } else {
        const uint2 x = get2(k_at + stage + half * 8 * ROW_BYTES), tail = BITS == 3 ? get2(k_tail_at + stage + half * 128) : x;
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const Decoded d = decode(i ? x.y : x.x, i ? tail.y : tail.x, k_select, lane_bytes);
          multiply(scores[half], d.low[0], d.low[1], d.low[FIELDS / 2 - 2], d.low[FIELDS / 2 - 1], queries[2 * i][0], queries[2 * i][1]);
          multiply(scores[half], d.high[0], d.high[1], d.high[FIELDS / 2 - 2], d.high[FIELDS / 2 - 1], queries[2 * i + 1][0], queries[2 * i + 1][1]);
        }
      }
    }
    // The first lanes of a row finish the first eight tokens, and the others the last eight.
    float s0 = (t < 2 ? scores[0][0] : scores[1][2]) + exchange(t < 2 ? scores[1][0] : scores[0][2], 2);
    float s1 = (t < 2 ? scores[0][1] : scores[1][3]) + exchange(t < 2 ? scores[1][1] : scores[0][3], 2);
    const uint4 factor = get4(factor_at);
    const float k_norm = __uint_as_float(factor.x), v_log = __uint_as_float(factor.z), v_power = __uint_as_float(factor.w);
    uint2 mean = {};
    if (MEAN_BITS) mean = get2(products_at + (page_first + at >> MEAN_SHIFT) * ROWS * 4);
    s0 = (s0 * k_norm + __uint_as_float(mean.x)) * scale0 - v_log;
    s1 = (s1 * k_norm + __uint_as_float(mean.y)) * scale1 - v_log;
    if (in_any_lane(s0 > limit0 || s1 > limit1)) {
      float most0 = fmaxf(s0, largest0), most1 = fmaxf(s1, largest1);
      for (int step = 2; step < 32; step *= 2) most0 = fmaxf(most0, exchange(most0, step)), most1 = fmaxf(most1, exchange(most1, step));
      const float rescale0 = exp2_of(largest0 - most0), rescale1 = exp2_of(largest1 - most1);
      largest0 = most0, largest1 = most1, limit0 = most0 + MARGIN, limit1 = most1 + MARGIN, total0 *= rescale0, total1 *= rescale1;
#pragma unroll
      for (int i = 0; i < 4; i++) sums[i][0] *= rescale0, sums[i][1] *= rescale1, sums[i][2] *= rescale0, sums[i][3] *= rescale1;
    }
    s0 = exp2_of(s0 - largest0), s1 = exp2_of(s1 - largest1);
    total0 += s0 * fabsf(v_power), total1 += s1 * fabsf(v_power);
    u32 weights = pack_half(s0, s1);
    if (V_NORM_BITS == 16) weights ^= (factor.w >> 31) * 0x80008000u;
    weights = transpose(weights);
    const u32 others = exchange_word(weights, 16);

    u32 words[BITS == 4 ? 8 : 4], v_tails[2] = {};
    load_matrices4(words, v_at + stage + SIDE_BYTES);
    if (BITS == 4) load_matrices4(words + WIDTH / 8, v_at2 + stage + SIDE_BYTES);
    if (BITS == 3) load_matrices2(v_tails, v_tail_at + stage + SIDE_BYTES);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 both = (g < 4) == (half == 0) ? weights : others, b0 = permute(both, 0, first_select), b1 = permute(both, 0, second_select);
#pragma unroll
      for (int i = 0; i < WIDTH / 8; i++) {
        const Decoded d = decode(words[i / 2 * 4 + half * 2 + i % 2], v_tails[half], i % 2 ? 0x7351u : 0x6341u, lane_bytes);
#pragma unroll
        for (int j = 0; j < FIELDS / 4; j++) multiply(sums[i * (FIELDS / 4) + j], d.low[2 * j], d.low[2 * j + 1], d.high[2 * j], d.high[2 * j + 1], b0, b1);
      }
    }
    stage = stage == (STAGES - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
  }

  // Merge the results of all warps, in place of the table.
  for (int step = 2; step < 32; step *= 2) total0 += exchange(total0, step), total1 += exchange(total1, step);
  const u32 largest_at = WARPS * ROWS * DIM * 4, totals_at = largest_at + WARPS * ROWS * 4;
  sync();
  if (lane < 2) {
    put2(largest_at + (warp * ROWS + own_row) * 4, largest0, largest1);
    put2(totals_at + (warp * ROWS + own_row) * 4, total0, total1);
  }
  sync();
  float most0 = NO_SCORE, most1 = NO_SCORE;
  for (int w = 0; w < WARPS; w++) {
    const uint2 x = get2(largest_at + (w * ROWS + own_row) * 4);
    most0 = fmaxf(most0, __uint_as_float(x.x)), most1 = fmaxf(most1, __uint_as_float(x.y));
  }
  const float rescale0 = exp2_of(largest0 - most0), rescale1 = exp2_of(largest1 - most1);
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int field = (i % (FIELDS / 4) * 2 + j / 2) * 2 + t / 2, channel = field * WIDTH + i / (FIELDS / 4) * 8 + g;
      const u32 column = get_half(CONSTANTS_AT + (LEVELS + DIM + channel) * 2);
      put(((warp * ROWS + own_row + j % 2) * DIM + column) * 4, sums[i][j] * (j % 2 ? rescale1 : rescale0));
    }
  sync();
  const i64 part = (i64)sequence * arg.padded * arg.parts + arg.first_part + item;
  for (int i = thread; i < arg.rows * DIM; i += WARPS * 32) {
    float sum = 0.0f;
    for (int w = 0; w < WARPS; w++) sum += __uint_as_float(get((w * ROWS * DIM + i) * 4));
    arg.sums[(part + (i64)(i / DIM) * arg.parts) * arg.columns + i % DIM] = sum;
  }
  if (thread < arg.rows) {
    float most = NO_SCORE, sum = 0.0f;
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, __uint_as_float(get(largest_at + (w * ROWS + thread) * 4)));
    for (int w = 0; w < WARPS; w++) {
      const u32 at = (w * ROWS + thread) * 4;
      sum += __uint_as_float(get(totals_at + at)) * exp2_of(__uint_as_float(get(largest_at + at)) - most);
    }
    arg.largest[part + (i64)thread * arg.parts] = most;
    arg.total[part + (i64)thread * arg.parts] = sum;
  }
  // The previous launch may still run: the merge waits only for this one, so this one must not end before it.
  if (!arg.first) wait_for_launch();
}
