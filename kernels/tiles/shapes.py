"""Launch shapes of attention kernels: warps per program, tiles in flight, and programs per multiprocessor."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvpack.kernels.bitpack.tile_packing import tile_field_count
from kvpack.kernels.tables.table_assembly import MAX_STATIC_BYTES

if TYPE_CHECKING:
    from kvpack.kernels.bitpack.streams import Stream
    from kvpack.kernels.loaders.tiles import OutlierConstants, Tiles

MIN_LARGE_TABLE_BYTES = 32 << 10
"""Size of shared tables, in bytes, above which few programs fit on a multiprocessor, so that more warps should share each table."""

MAX_SMALL_TILES = 4
"""Number of tiles per side above which registers instead of shared memory limit the programs on a multiprocessor."""

MAX_SMALL_BYTES, MANY_TOKENS = 64, 6000
"""Thresholds for larger tiles: maximum bytes of codes per token, and minimum tokens per multiprocessor."""

MIN_FULL_TILES = 8
"""Minimum number of tiles per program for a launch to use all multiprocessors."""

MIN_WIDE_PAIR_BYTES = 256
"""Minimum number of bytes, of the two tokens in one tile row together, for which fewer tiles in flight are faster."""

MULTIPROCESSOR_BYTES = 228 << 10
"""Shared memory per multiprocessor, in bytes."""

SHARED_BYTES = 220 << 10
"""Shared memory per multiprocessor for tables and tiles in flight, in bytes."""

MAX_BYTES_IN_FLIGHT = 96 << 10
"""Maximum number of bytes of tiles that a program loads ahead."""

LARGE_TABLE_BYTES, MIN_COPIES = 80 << 10, 8
"""Constants for tables larger than the assembly declares: bytes for each of two programs, and minimum copies of an entry.

With fewer copies, two programs per multiprocessor are not enough.
"""

MAX_MEAN_BITS = 1 << 10
"""Maximum bits per page mean of keys if tables are larger than the assembly declares.

The means that are multiplied together must fit in the compiler's shared memory before the tables (``COMPILER_BYTES``).
"""

SYSTEM_BYTES = 1 << 10
"""Shared memory per program that the CUDA system reserves, in bytes."""

STATIC_SHARED_BYTES = (48 << 10) - SYSTEM_BYTES
"""Maximum shared memory that a kernel may declare, for patches and tables together, in bytes."""

CONVERSION_BYTES = 96
"""Shared memory per token that the compiler uses, mostly to convert rows to the layout of matrix operands, in bytes."""


PATCH_TILE_BYTES = 1 << 10
"""Number of bytes in which ``outlier_patches`` swizzles positions: eight lines of 128 bytes."""


class LaunchShape(NamedTuple):
    """Shape of a launch: warps per program, tiles per warp, tokens per tile, pipeline stages, and programs per multiprocessor."""

    warps: int
    tiles: int
    tokens: int
    stages: int
    programs: int
    balanced: bool = False
    """True if ``programs`` programs use all registers or all shared memory of a multiprocessor."""


def choose_shape(k: Tiles, v: Tiles, table_bytes: int, tokens: int, alignment: int, fast: bool) -> LaunchShape:
    """Return the launch shape that is fastest on an H200, for tables of ``table_bytes`` bytes and ``tokens`` tokens per multiprocessor.

    The first row of every program is a multiple of ``alignment``. The choice is based on measurements with one to eight warps, one or two
    tiles of 16 to 64 tokens, two to four stages, and 96 to 255 registers. Loaders with one row per thread are slower with several stages;
    they were measured with one to four warps and at least 168 registers. Programs take 50% longer if their number of warps is not a
    multiple of the four schedulers.
    """
    if not fast:
        return LaunchShape(2, 1, 32, 1, 4)
    # Two tokens that share a tile row count as one token with the bytes of both.
    together = 2 if k.dual or v.dual else 1
    tokens //= together
    token_bytes = together * sum(_bytes_per_token(stream, alignment) for stream in (*k.streams, *v.streams))
    few_bytes = 2 * sum(sum(packing.planes) for packing in (*k.packings, *v.packings)) <= MAX_SMALL_BYTES
    tables = [tiles.table for tiles in (k, v) if tiles.table is not None]
    max_tokens = min(k.max_tokens_per_tile, v.max_tokens_per_tile)
    plain = k.outliers is v.outliers is None
    many = tokens >= MANY_TOKENS and together == 1
    small = LaunchShape(1, 1, min(32, max_tokens), 3, 8)
    many_tiles = len(tables) == 2 and min(len(k.channels), len(v.channels)) > MAX_SMALL_TILES
    if max(k.tokens, v.tokens) > 32:
        # Large tables leave room for few programs per multiprocessor.
        warps, programs = (4, 2) if table_bytes > MAX_STATIC_BYTES else (2, 4)
        shape = LaunchShape(warps, 1, max(k.tokens, v.tokens), 1, programs, True)
    elif not k.dtype == v.dtype == "fp16" or (table_bytes > MIN_LARGE_TABLE_BYTES and many_tiles):
        shape = LaunchShape(2, 1, 32, 2, 4)
    elif table_bytes > MIN_LARGE_TABLE_BYTES:
        narrow = any(tile_field_count(packing) > 1 for packing in (*k.packings, *v.packings))
        shape = LaunchShape(2, 1, 32, 4 - together, 4) if narrow else LaunchShape(4, 1, 32, 3, 2)
    elif table_bytes and small.programs * (table_bytes + small.stages * small.tokens * token_bytes) > SHARED_BYTES:
        # A program's warps share the table's copies. One stage with twice the bytes hides as much latency as two.
        shape = LaunchShape(2, 1, 32, 2 if together > 1 and token_bytes >= MIN_WIDE_PAIR_BYTES else 3, 4)
        # Column constants leave no registers for a second tile.
        if many and few_bytes and plain and k.load_columns is v.load_columns is None:
            shape = shape._replace(tiles=2)
    elif table_bytes == 0 and many and max_tokens > small.tokens and alignment % max_tokens == 0:
        shape = small._replace(tokens=max_tokens)
    elif table_bytes == 0 and many and few_bytes and plain:
        shape = small._replace(tiles=2, programs=12, balanced=True)
    else:
        shape = small
    tile_bytes = shape.warps * shape.tiles * shape.tokens * token_bytes
    stages = max(1, min(shape.stages if plain else 2, shape.stages, MAX_BYTES_IN_FLIGHT // tile_bytes))
    # No multiprocessor has shared memory for one more program.
    full = (shape.programs + 1) * (table_bytes + (stages - 1) * tile_bytes + SYSTEM_BYTES) > MULTIPROCESSOR_BYTES
    full &= tokens >= shape.programs * MIN_FULL_TILES * shape.warps * shape.tiles * shape.tokens
    return shape._replace(stages=stages, balanced=shape.balanced or full)


def table_budget(k: Tiles, v: Tiles) -> int:
    """Return the number of bytes of shared memory that the tables of keys and values may use together."""
    alone = [tiles for tiles in (k, v) if tiles.many_copies and tiles.outliers is tiles.signs is None]
    tables = [tiles.table for tiles in alone if tiles.table is not None]
    if k.means is not None and k.means.dim * k.means.bits > MAX_MEAN_BITS:
        return MAX_STATIC_BYTES
    if len(tables) == 2 and MIN_COPIES * max(table.nbytes for table in tables) <= LARGE_TABLE_BYTES:
        return LARGE_TABLE_BYTES
    return MAX_STATIC_BYTES


def plan_patches(k: Tiles, v: Tiles, shape: LaunchShape, table_bytes: int) -> tuple[OutlierConstants | None, OutlierConstants | None, int]:
    """Return the outlier constants of keys and of values (None without outliers), and the number of bytes for the patches of all warps.

    A patch contains as many tiles as fit in the shared memory of a program, next to tables of ``table_bytes`` bytes. If not even one tile
    fits, or if tiles are not multiples of ``PATCH_TILE_BYTES``, there are no patches, and the number of bytes is 0.
    """
    own_bytes = MULTIPROCESSOR_BYTES // shape.programs - SYSTEM_BYTES - CONVERSION_BYTES * shape.warps * shape.tokens
    limit = (min(own_bytes, STATIC_SHARED_BYTES) - table_bytes) // shape.warps
    tile_counts, most = [], 0
    for outliers in (k.outliers, v.outliers):
        tile_bytes = 2 * shape.tokens * (outliers.width if outliers else 1)
        swizzled = tile_bytes % PATCH_TILE_BYTES == 0
        tile_counts.append(max(0, min(limit // tile_bytes, outliers.tiles)) if outliers and swizzled else 0)
        most = max(most, tile_counts[-1] * tile_bytes)
    k_constants = k.outliers and k.outliers._replace(patch_tiles=tile_counts[0], patch_bytes=most)
    v_constants = v.outliers and v.outliers._replace(patch_tiles=tile_counts[1], patch_bytes=most)
    return k_constants, v_constants, most * shape.warps


def _bytes_per_token(stream: Stream, alignment: int) -> int:
    """Return the number of bytes of ``stream`` that are loaded per token, in a tile of at least 32 tokens."""
    shared = alignment % stream.tokens == 0 and stream.tokens % 32 == 0
    return stream.row * stream.bits // (8 * stream.tokens if shared else 8)
