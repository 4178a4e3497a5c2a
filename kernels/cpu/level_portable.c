/* The vectors that every target supports: SSE2 on x86-64, NEON on AArch64. */
#if defined(__x86_64__) && !defined(__clang__)
/* Few x86-64 processors use this level. With smaller loops, attention takes up to 14 % longer, but the code is a quarter smaller. */
#pragma GCC optimize("O2")
#endif
#define LEVEL 1
#define NAME kvpack_portable
#define TITLE "portable"
#include "kernels.h"
