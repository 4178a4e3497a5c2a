/* The vectors of every target: SSE2 on x86-64, NEON on AArch64. */
#define LEVEL 1
#define NAME kvpack_portable
#define TITLE "portable"
#include "kernels.h"
