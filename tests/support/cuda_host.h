// Runs kernels of kernels/cuda on a CPU: every thread of a block is a coroutine, which yields until the others reach the same barrier.
#include <ucontext.h>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#define KVPACK_HOST
#define DEVICE static inline
#define KERNEL static void

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct Index { int x; };
struct Barrier { int size, waiting = 0, rounds = 0; };
struct Warp { Barrier barrier{32}; uint32_t words[32][6]; };

static Index threadIdx, blockIdx;
static std::vector<char> shared;
static std::vector<Warp> warps;
static std::vector<ucontext_t> contexts;
static ucontext_t scheduler;
static Barrier block_barrier;

static inline void wait_at(Barrier& barrier) {
  const int round = barrier.rounds, thread = threadIdx.x;
  if (++barrier.waiting == barrier.size) {
    barrier.waiting = 0, barrier.rounds++;
    return;
  }
  while (barrier.rounds == round) {
    swapcontext(&contexts[thread], &scheduler);
    threadIdx.x = thread;
  }
}

// Exchange ``count`` words with all lanes of the warp, and return what ``read`` computes from them.
template <class Read> static inline auto with_lanes(const uint32_t* own, int count, Read read) {
  Warp& warp = warps[threadIdx.x / 32];
  memcpy(warp.words[threadIdx.x % 32], own, 4 * count);
  wait_at(warp.barrier);
  auto result = read(warp.words, threadIdx.x % 32);
  wait_at(warp.barrier);
  return result;
}

template <class To, class From> static inline To bits_of(From x) { To y; static_assert(sizeof(x) == sizeof(y)); memcpy(&y, &x, sizeof(y)); return y; }
static inline float __int_as_float(int x) { return bits_of<float>(x); }
static inline float __uint_as_float(uint32_t x) { return bits_of<float>(x); }
static inline float from_half(uint32_t x) { return (float)bits_of<_Float16>((uint16_t)x); }
static inline float half_of(uint32_t x, int upper) { return from_half(upper ? x >> 16 : x & 0xFFFF); }
static inline uint32_t pack_half(float a, float b) { return bits_of<uint16_t>((_Float16)a) | (uint32_t)bits_of<uint16_t>((_Float16)b) << 16; }
static inline float exp2_of(float x) { return std::exp2(x); }
static inline float log2_of(float x) { return std::log2(x); }
static inline uint32_t permute(uint32_t a, uint32_t b, uint32_t select) {
  const uint64_t both = a | (uint64_t)b << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) result |= (uint32_t)(both >> 8 * (select >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
template <class T> static inline T get_as(uint32_t at) { T x; memcpy(&x, &shared.at(at + sizeof(T) - 1) - (sizeof(T) - 1), sizeof(T)); return x; }
template <class T> static inline void put_as(uint32_t at, T x) { memcpy(&shared.at(at + sizeof(T) - 1) - (sizeof(T) - 1), &x, sizeof(T)); }
static inline uint32_t get(uint32_t at) { return get_as<uint32_t>(at); }
static inline uint32_t get_half(uint32_t at) { return get_as<uint16_t>(at); }
static inline uint2 get2(uint32_t at) { return get_as<uint2>(at); }
static inline uint4 get4(uint32_t at) { return get_as<uint4>(at); }
static inline uint32_t look_up(uint32_t at) { return get(at); }
static inline uint32_t look_up_upper(uint32_t at) { return get(at + 128); }
static inline uint2 look_up_four(uint32_t at) { return get2(at); }
static inline void put(uint32_t at, float x) { put_as(at, x); }
static inline void put_half(uint32_t at, uint32_t x) { put_as(at, (uint16_t)x); }
static inline void put2(uint32_t at, float x, float y) { put(at, x), put(at + 4, y); }
static inline void put4(uint32_t at, uint32_t x, uint32_t y) { put_as(at, uint4{x, y, x, y}); }
static inline uint32_t load8(const char* p) { return (uint8_t)*p; }
static inline uint32_t load16(const char* p) { uint16_t x; memcpy(&x, p, 2); return x; }
static inline void copy16(uint32_t to, const char* from) { uint4 x; memcpy(&x, from, 16); put_as(to, x); }
static inline void commit_copies() {}
static inline void wait_for_copies() {}
static inline void wait_for_launch() {}
static inline void launch_dependents() {}
static inline void check_base() {}
template <class T> static inline void keep(T&) {}
static inline void sync() { wait_at(block_barrier); }
static inline void sync_warp() { wait_at(warps[threadIdx.x / 32].barrier); }
static inline uint32_t exchange_word(uint32_t x, int mask) {
  return with_lanes(&x, 1, [&](auto words, int lane) { return words[lane ^ mask][0]; });
}
static inline float exchange(float x, int mask) { return __uint_as_float(exchange_word(bits_of<uint32_t>(x), mask)); }
static inline bool in_any_lane(bool x) {
  const uint32_t word = x;
  return with_lanes(&word, 1, [](auto words, int) { bool any = false; for (int i = 0; i < 32; i++) any |= words[i][0]; return any; });
}
static inline uint32_t transpose(uint32_t x) {
  return with_lanes(&x, 1, [](auto words, int lane) {
    const int row = lane / 4, column = lane % 4 * 2;
    auto at = [&](int i, int j) { return words[i * 4 + j / 2][0] >> 16 * (j % 2) & 0xFFFF; };
    return at(column, row) | at(column + 1, row) << 16;
  });
}
static inline void load_matrices(uint32_t* d, uint32_t at, int count) {
  with_lanes(&at, 1, [&](auto words, int lane) {
    for (int i = 0; i < count; i++) {
      const uint32_t *rows = words[i * 8], offset = lane / 4 * 2;
      d[i] = get_half(rows[lane % 4 * 2 * 6] + offset) | get_half(rows[(lane % 4 * 2 + 1) * 6] + offset) << 16;
    }
    return 0;
  });
}
static inline void load_matrices2(uint32_t* d, uint32_t at) { load_matrices(d, at, 2); }
static inline void load_matrices4(uint32_t* d, uint32_t at) { load_matrices(d, at, 4); }
static inline void multiply(float* c, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const uint32_t own[6] = {a0, a1, a2, a3, b0, b1};
  with_lanes(own, 6, [&](auto words, int lane) {
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4, column = lane % 4 * 2 + i % 2;
      float sum = c[i];
      for (int k = 0; k < 16; k++) {
        const int at = k % 8 / 2;
        sum += half_of(words[row * 4 + at][i / 2 + k / 8 * 2], k % 2) * half_of(words[column * 4 + at][4 + k / 8], k % 2);
      }
      c[i] = sum;
    }
    return 0;
  });
}

static std::function<void()> body;
static std::vector<bool> ended;
static void run_thread(int thread) {
  threadIdx.x = thread;
  body();
  ended[thread] = true;
}
static void run_block(int block, int threads, int shared_bytes, std::function<void()> kernel) {
  static std::vector<std::vector<char>> stacks(threads, std::vector<char>(64 << 10));
  body = kernel, blockIdx.x = block, block_barrier = Barrier{threads};
  shared.assign(shared_bytes, 0x5A), warps.assign(threads / 32, Warp()), contexts.resize(threads), ended.assign(threads, false);
  for (int thread = 0; thread < threads; thread++) {
    getcontext(&contexts[thread]);
    contexts[thread].uc_stack.ss_sp = stacks[thread].data(), contexts[thread].uc_stack.ss_size = stacks[thread].size();
    contexts[thread].uc_link = &scheduler;
    makecontext(&contexts[thread], (void (*)())run_thread, 1, thread);
  }
  for (bool busy = true; busy;) {
    busy = false;
    for (int thread = 0; thread < threads; thread++)
      if (!ended[thread]) {
        busy = true, threadIdx.x = thread;
        swapcontext(&scheduler, &contexts[thread]);
      }
  }
}
