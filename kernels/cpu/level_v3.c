/* x86-64-v3: AVX2. */
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif
#define LEVEL 3
#define NAME kvpack_v3
#define TITLE "x86-64-v3"
#include "kernels.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
