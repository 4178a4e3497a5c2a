/* x86-64-v4: AVX-512. */
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,f16c,bmi,bmi2")
#endif
#define LEVEL 4
#define NAME kvpack_v4
#define TITLE "x86-64-v4"
#include "kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
