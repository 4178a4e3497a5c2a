/* x86-64-v3: AVX2. */
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
/* Copies of loops and functions take 13 KB of a wheel, and save a twentieth of the time to pack trellis, and nothing else that was measured. */
#pragma GCC optimize("no-unswitch-loops", "no-peel-loops", "no-split-paths", "no-version-loops-for-strides", "no-split-loops", "no-ipa-cp-clone")
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
