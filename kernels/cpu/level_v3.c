/* x86-64-v3: AVX2. */
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
/* Copies of loops for what does not vary inside them, and of their first steps, take 7 KB of a wheel, and save no time here. */
#pragma GCC optimize("no-unswitch-loops", "no-peel-loops", "no-split-paths", "no-version-loops-for-strides")
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
