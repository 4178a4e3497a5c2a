"""The shape of a kernel's program: its warps, the tiles that they process at once, and the programs per multiprocessor."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvpack.kernels.bitpack.tile_packing import tile_field_count
from kvpack.kernels.tables.table_assembly import LARGEST_BYTES

if TYPE_CHECKING:
    from kvpack.kernels.bitpack.streams import Stream
    from kvpack.kernels.loaders.tiles import Outliers, Tiles

LARGE_TABLES = 32 << 10
"""Bytes of shared tables above which programs are few and share them among more warps."""

MAX_SMALL_TILES = 4
"""Tiles per side above which registers, not shared memory, limit the programs of a multiprocessor."""

MAX_SMALL_BYTES, MANY_TOKENS = 64, 6000
"""Maximum number of bytes of codes per token, and fewest tokens per multiprocessor, with which more tokens at once are faster."""

MANY_BYTES = 256
"""Bytes of two tokens that share a row, from which fewer tiles in flight are faster."""

MULTIPROCESSOR_BYTES = 228 << 10
"""Shared memory of a multiprocessor."""

SHARED_BYTES = 220 << 10
"""Shared memory of a multiprocessor for tables and tiles in flight."""

MAX_BYTES_IN_FLIGHT = 96 << 10
"""Bytes of tiles that a program fetches ahead of time, at most."""

LARGE_TABLE_BYTES, MIN_COPIES = 80 << 10, 8
"""For tables larger than the assembly declares: bytes for each of two programs, and the fewest copies of an entry with which two
programs are enough."""

SYSTEM_BYTES = 1 << 10
"""Shared memory per program that the system reserves."""

STATIC_SHARED_BYTES = (48 << 10) - SYSTEM_BYTES
"""Shared memory that a kernel may declare, for patches and tables together."""

CARRIED_BYTES = 96
"""Shared memory per token that the compiler uses, mostly to convert rows to the layout of the matrix units."""


class LaunchShape(NamedTuple):
    """Warps per program, tiles per warp, tokens per tile, stages of tiles in flight, and programs per multiprocessor."""

    warps: int
    tiles: int
    tokens: int
    stages: int
    programs: int
    balanced: bool = False
    """True if the registers of ``programs`` are all that a multiprocessor has."""


def shape_of(k: Tiles, v: Tiles, table_bytes: int, tokens: int, aligned: int, fast: bool) -> LaunchShape:
    """Return the fastest shape measured on an H200 for tables of ``table_bytes`` and ``tokens`` per multiprocessor.

    ``aligned`` divides all first rows. We tried one to eight warps, tiles of 16 to 64 tokens, one or two of them, two to four stages, and
    96 to 255 registers; for rows that one thread holds, whose loads lose from stages, one to four warps and 168 or more registers. Programs
    whose number of warps is not a multiple of the four schedulers are half as slow again.
    """
    if not fast:
        return LaunchShape(2, 1, 32, 1, 4)
    # Tokens that share a row of a tile count as one, of as many bytes.
    together = 2 if k.dual or v.dual else 1
    tokens //= together
    token_bytes = together * sum(_bytes(stream, aligned) for stream in (*k.streams, *v.streams))
    few_bytes = 2 * sum(sum(packing.planes) for packing in (*k.packings, *v.packings)) <= MAX_SMALL_BYTES
    tables = [tiles.table for tiles in (k, v) if tiles.table is not None]
    most_tokens = min(k.most_tokens, v.most_tokens)
    plain = k.outliers is v.outliers is None
    many = tokens >= MANY_TOKENS and together == 1
    small = LaunchShape(1, 1, min(32, most_tokens), 3, 8)
    many_tiles = len(tables) == 2 and min(len(k.channels), len(v.channels)) > MAX_SMALL_TILES
    if max(k.tokens, v.tokens) > 32:
        # Large tables leave room for few programs per multiprocessor.
        warps, programs = (4, 2) if table_bytes > LARGEST_BYTES else (2, 4)
        shape = LaunchShape(warps, 1, max(k.tokens, v.tokens), 1, programs, True)
    elif not k.dtype == v.dtype == "fp16" or (table_bytes > LARGE_TABLES and many_tiles):
        shape = LaunchShape(2, 1, 32, 2, 4)
    elif table_bytes > LARGE_TABLES:
        narrow = any(tile_field_count(packing) > 1 for packing in (*k.packings, *v.packings))
        shape = LaunchShape(2, 1, 32, 4 - together, 4) if narrow else LaunchShape(4, 1, 32, 3, 2)
    elif table_bytes and small.programs * (table_bytes + small.stages * small.tokens * token_bytes) > SHARED_BYTES:
        # Programs share a table's copies among their warps. One tile ahead of twice as many bytes is as much as two.
        shape = LaunchShape(2, 1, 32, 2 if together > 1 and token_bytes >= MANY_BYTES else 3, 4)
        # Constants of columns leave no registers for a second tile.
        if many and few_bytes and plain and k.load_columns is v.load_columns is None:
            shape = shape._replace(tiles=2)
    elif table_bytes == 0 and many and most_tokens > small.tokens and aligned % most_tokens == 0:
        shape = small._replace(tokens=most_tokens)
    elif table_bytes == 0 and many and few_bytes and plain:
        shape = small._replace(tiles=2, programs=12, balanced=True)
    else:
        shape = small
    tile_bytes = shape.warps * shape.tiles * shape.tokens * token_bytes
    stages = shape.stages if plain else min(shape.stages, 2)
    return shape._replace(stages=max(1, min(stages, MAX_BYTES_IN_FLIGHT // tile_bytes)))


def table_budget(k: Tiles, v: Tiles) -> int:
    """Return the bytes of shared memory that the tables of both sides may use together."""
    alone = [tiles for tiles in (k, v) if tiles.many_copies and tiles.outliers is tiles.signs is None]
    tables = [tiles.table for tiles in alone if tiles.table is not None]
    if len(tables) == 2 and MIN_COPIES * max(table.nbytes for table in tables) <= LARGE_TABLE_BYTES:
        return LARGE_TABLE_BYTES
    return LARGEST_BYTES


def in_patches(k: Tiles, v: Tiles, shape: LaunchShape, table_bytes: int) -> tuple[Outliers | None, Outliers | None, int]:
    """Return the outlier constants of both sides, if they have outliers, and the bytes for the patches of all warps.

    A patch contains as many of a side's tiles as fit next to tables of ``table_bytes`` in every program of a multiprocessor. If not even
    one fits, the number is 0 and no patch is used.
    """
    own_bytes = MULTIPROCESSOR_BYTES // shape.programs - SYSTEM_BYTES - CARRIED_BYTES * shape.warps * shape.tokens
    limit = (min(own_bytes, STATIC_SHARED_BYTES) - table_bytes) // shape.warps
    together, most = [], 0
    for outliers in (k.outliers, v.outliers):
        tile_bytes = 2 * shape.tokens * (outliers.width if outliers else 1)
        together.append(max(0, min(limit // tile_bytes, outliers.tiles)) if outliers else 0)
        most = max(most, together[-1] * tile_bytes)
    k_constants = k.outliers and k.outliers._replace(together=together[0], patch_bytes=most)
    v_constants = v.outliers and v.outliers._replace(together=together[1], patch_bytes=most)
    return k_constants, v_constants, most * shape.warps


def _bytes(stream: Stream, aligned: int) -> int:
    """Return the bytes per token in a tile of 32 or more tokens, which contains one row per token, or one for all tokens that share it."""
    shared = aligned % stream.tokens == 0 and stream.tokens % 32 == 0
    return stream.row * stream.bits // (8 * stream.tokens if shared else 8)
