/* The vectors of every target: SSE2 on x86-64, NEON on AArch64. */
#if defined(__x86_64__) && !defined(__clang__)
/* Few processors of x86-64 run this level: without larger loops attention takes up to 14 % longer, and the level a quarter less space. */
#pragma GCC optimize("O2")
#endif
#define LEVEL 1
#define NAME kvpack_portable
#define TITLE "portable"
#include "kernels.h"
