/* The reader as one translation unit. Each part needs only the parts before it. */
#include "kvpack.h"

#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base.c"
#include "digests.c"
#include "cipher.c"
#include "msgpack.c"
#include "zstd.c"
#include "packing.c"
#include "parameters.c"
#include "streams.c"
#include "basis.c"
#include "header.c"
#include "columns.c"
#include "codecs.c"
#include "sidecars.c"
#include "container.c"
#include "page.c"
#include "store.c"
