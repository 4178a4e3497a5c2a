/* x86-64-v3: AVX2. */
#if defined(__x86_64__)
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi,bmi2"))), apply_to = function)
#else
/* A smaller library, without copies of loops and functions: trellis takes 6 % longer to pack, and kvpack-3 5 % to attend. */
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
