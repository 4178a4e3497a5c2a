"""Tiles of outliers in shared memory, stored by inline PTX, because Triton cannot store single values there.

Outliers are written into a patch of zeros, at the row of their token and at their columns. Matrix products read the patch like a tile of
the codec. Then the outliers in the patch are set to zero again. Without inline PTX, or with too little shared memory, the same tile is
computed as a product.
"""

# Triton compiles no conditional expressions of tensors.
# ruff: noqa: SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from triton import language as tl

from kvpack.kernels.bitpack.tile_layout import broadcast_columns, broadcast_tokens

if TYPE_CHECKING:
    from .tiles import OutlierConstants

GRANULE = tl.constexpr(32)
"""Number of tokens in a granule. The entries of a granule are sorted by token."""

DISTINCT_TOKENS = tl.constexpr(128)
"""Number of tokens that an entry's position can distinguish. A warp's tile, plus the granules at both ends, has fewer tokens."""


@triton.constexpr_function
def _declare_ptx(size: int) -> str:
    return f".shared .align 16 .b8 kvpack_patches[{size}]; mov.u32 $0, 0;"


@triton.constexpr_function
def _zero_ptx(size: int, threads: int) -> str:
    stores = "".join(f"st.shared.v4.b32 [at + {place}], {{zero, zero, zero, zero}};" for place in range(0, size, 16 * threads))
    return f"{{ .reg .b32 at, zero; mov.u32 at, kvpack_patches; mad.lo.u32 at, $1, 16, at; mov.u32 zero, 0; {stores} mov.u32 $0, 0; }}"


@triton.jit
def declare_patches(SIZE: tl.constexpr, WARPS: tl.constexpr) -> None:
    """Reserve ``SIZE`` bytes of shared memory for patches, and fill them with zeros. Call it once per kernel.

    A ``tl.debug_barrier`` must follow.
    """
    tl.inline_asm_elementwise(_declare_ptx(SIZE), "=r,r", [tl.arange(0, 32 * WARPS)], dtype=tl.int32, is_pure=False, pack=1)
    _put_zeros(SIZE, WARPS)


@triton.jit
def _put_zeros(SIZE: tl.constexpr, WARPS: tl.constexpr) -> None:
    ASSEMBLY: tl.constexpr = _zero_ptx(SIZE, 32 * WARPS)
    tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [tl.arange(0, 32 * WARPS)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def patch_positions(
    iota: tl.tensor, CONSTANTS: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr, TRANSPOSED: tl.constexpr
) -> tl.tensor:
    """Return the position in the patch of each value of a tile. It is computed from the loaded ``iota`` (``bitfields.load_column_fields``).
    """
    WIDTH: tl.constexpr = CONSTANTS.width
    row = tl.load(iota + tl.arange(0, TOKENS)[None, :]).to(tl.int32)
    column = tl.load(iota + tl.arange(0, WIDTH)[None, :]).to(tl.int32)
    if TRANSPOSED:
        place = broadcast_tokens(row * 2, TRANSPOSED) ^ broadcast_columns(_swizzle(column * (2 * TOKENS)), TRANSPOSED)
    else:
        place = broadcast_tokens(_swizzle(row * (2 * WIDTH)), TRANSPOSED) ^ broadcast_columns(_swizzle(column * 2), TRANSPOSED)
    if WARPS > 1:
        place += tl.load(iota + tl.arange(0, WARPS)[:, None, None]).to(tl.int32) * CONSTANTS.patch_bytes
    return place


@triton.jit
def fetch_iota(iota: tl.tensor) -> None:
    """Prefetch the part of ``iota`` that ``patch_positions`` loads, for programs that compute positions late."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [iota.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _swizzle(position: tl.tensor) -> tl.tensor:
    """Swizzle the 16-byte pieces of each 128-byte line, to avoid bank conflicts between the eight rows of a matrix instruction.

    All tiles have the same layout, because their sizes are multiples of 1,024 bytes.
    """
    return position ^ ((position >> 3) & 0x70)


@triton.constexpr_function
def _store_ptx(first: int, tokens: int, transposed: bool, constants: OutlierConstants) -> str:
    """Return PTX that stores the four values of an entry in its token's row. Columns outside the patch are skipped.

    The patch begins with tile ``first``. If columns are in channel order, the entry contains only the column of its first value, and the
    other three are in the next columns. Otherwise, the entry contains four 16-bit columns.
    """
    width, components, patch_tiles = constants.width, constants.components, constants.patch_tiles
    columns = patch_tiles * width
    if transposed:
        at = f"mad.lo.u32 at, column, {2 * tokens}, $1;"
    else:
        at = f"and.b32 at, column, {width - 1}; mad.lo.u32 at, at, 2, $1;"
        if columns > width:
            at += f"shr.u32 column, column, {width.bit_length() - 1}; mad.lo.u32 at, column, {2 * tokens * width}, at;"
    exchanged = "shr.u32 line, at, 3; lop3.b32 line, line, 0x70, at, 0x6A; add.u32 line, line, base;"
    inside = f"sub.u32 column, column, {first * width}; setp.lt.u32 real, column, {columns};"
    if components is None and not transposed:
        stores = f"mov.u32 column, $3; {inside} {at} {exchanged} @real st.shared.b64 [line], $2;"
    elif components is None:
        # Columns begin at a multiple of four, so bits are disjoint, and an exclusive or replaces the addition.
        stores = f"mov.u32 column, $3; {inside} {at} shr.u32 line, at, 3; lop3.b32 line, line, 0x70, at, 0x6A;"
        for number, apart in enumerate(range(0, 8 * tokens, 2 * tokens)):
            stores += f"xor.b32 at, line, {apart ^ apart >> 3 & 0x70}; add.u32 at, at, base; @real st.shared.b16 [at], value{number};"
    else:
        stores = "mov.b64 {column0, column1, column2, column3}, $3;"
        for number in sorted({number for tile in components[first : first + patch_tiles] for number in tile}):
            stores += f"cvt.u32.u16 column, column{number}; {inside} {at} {exchanged} @real st.shared.b16 [line], value{number};"
    return f"""{{ .reg .pred real; .reg .b32 base, at, line, column; .reg .b16 column<4>, value<4>;
        mov.u32 base, kvpack_patches; mov.b64 {{value0, value1, value2, value3}}, $2; {stores} mov.u32 $0, 0; }}"""


@triton.jit
def _tile_row(position: tl.tensor, entries: tl.tuple, TILE: tl.constexpr, TOKENS: tl.constexpr) -> tl.tensor:
    """Return the token of each entry, counted from the first token of the warp's tile ``TILE``.

    Entries of other tiles get a number outside [0, ``TOKENS``).
    """
    return ((position - entries[2] + GRANULE) & (DISTINCT_TOKENS - 1)) - (GRANULE + TILE * TOKENS)


@triton.jit
def locate_entries(
    entries: tl.tuple,
    loaded: tl.tuple,
    TILE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Return the patch row, the values and the columns of each of the ``loaded`` entries, for a warp's tile ``TILE``.

    Without a patch in shared memory, return ``loaded`` unchanged.
    """
    result = loaded
    if FAST and CONSTANTS.patch_tiles > 0:
        row = _tile_row(loaded[0], entries, TILE, TOKENS)
        chunk = loaded[0] // DISTINCT_TOKENS
        real = (loaded[0] >= 0) & (row >= 0) & (row < TOKENS)
        IN_ORDER: tl.constexpr = has_channel_order(CONSTANTS)
        if IN_ORDER:
            columns = tl.where(real, 4 * chunk, -1)
        else:
            # The four columns of a chunk are one integer.
            columns = tl.load(entries[0][4].to(tl.pointer_type(tl.int64)) + chunk, real, -1)
        TOKEN_BYTES: tl.constexpr = 2 if TRANSPOSED else 2 * CONSTANTS.width
        place = row * TOKEN_BYTES + tl.arange(0, row.shape[0])[:, None] * CONSTANTS.patch_bytes
        result = (place, loaded[1], columns)
    return result


@triton.jit
def write_patch(
    entries: tl.tuple,
    result: tl.tuple,
    FIRST: tl.constexpr,
    CONSTANTS: tl.constexpr,
    TOKENS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    CLEAR: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Write located entries to the patch that begins with tile ``FIRST``.

    With ``CLEAR``, write zeros instead, after all reads of the patch. Returns a zero. Readers of the patch must use it as an operand, so
    that they read after the writes.
    """
    after = 0
    if FAST and CONSTANTS.patch_tiles > 0:
        IN_ORDER: tl.constexpr = has_channel_order(CONSTANTS)
        ASSEMBLY: tl.constexpr = _store_ptx(FIRST, TOKENS, TRANSPOSED, CONSTANTS)
        REGISTERS: tl.constexpr = "=r,r,l,r" if IN_ORDER else "=r,r,l,l"
        WARPS: tl.constexpr = result[0].shape[0]
        values = result[1]
        if CLEAR:
            values = tl.zeros(values.shape, tl.int64)
            _synchronize(entries)
        if CLEAR and not IN_ORDER:
            # Zeroing everything is faster than finding the positions to zero.
            _put_zeros(WARPS * CONSTANTS.patch_bytes, WARPS)
        else:
            tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, [result[0], values, result[2]], dtype=tl.int32, is_pure=False, pack=1)
        after = _synchronize(entries)
    return after


@triton.jit
def _synchronize(entries: tl.tuple) -> tl.tensor:
    """Wait for all writers and readers of a patch. Returns a zero that readers use as an operand."""
    WARPS: tl.constexpr = entries[2].shape[0]
    if WARPS > 1:
        tl.debug_barrier()
    return tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r,r", [entries[1][3]], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.constexpr_function
def _read_ptx(offset: int) -> str:
    """Return PTX that reads two neighboring values. The second address and the zeros of ``write_patch`` only order the reads."""
    return f"{{ .reg .b32 at; mov.u32 at, kvpack_patches; add.u32 at, at, $1; ld.shared.b32 $0, [at + {offset}]; }}"


@triton.jit
def _read_tile(
    entries: tl.tuple, positions: tl.tensor, after: tl.tensor, COLUMN_TILE: tl.constexpr, CONSTANTS: tl.constexpr, TOKENS: tl.constexpr
) -> tl.tensor:
    ASSEMBLY: tl.constexpr = _read_ptx(COLUMN_TILE % CONSTANTS.patch_tiles * CONSTANTS.width * 2 * TOKENS)
    # Adding ``after`` to the address makes the load wait for the instruction that produced it.
    zero = tl.load(entries[3][0] + after + tl.zeros((1, 1, 1), tl.int32)).to(tl.int32)
    return tl.inline_asm_elementwise(ASSEMBLY, "=r,r,r,r,r", [positions, zero], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _compute_tile(
    entries: tl.tuple,
    loaded: tl.tuple,
    TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
) -> tl.tensor:
    """Compute the tile of ``outlier_tile`` without shared memory, as a product of entries and a 0/1 matrix of their tokens."""
    WIDTH: tl.constexpr = CONSTANTS.width
    place, values = loaded[0], loaded[1]
    row = _tile_row(place, entries, TILE, TOKENS)
    real = place >= 0
    is_token = tl.where(real[:, None, :] & (row[:, None, :] == tl.arange(0, TOKENS)[None, :, None]), 1.0, 0.0).to(tl.float16)
    column_of = tl.load(entries[0][4].to(tl.pointer_type(tl.int64)) + place // DISTINCT_TOKENS, real, 0)
    rows = tl.zeros((WARPS, place.shape[1], WIDTH), tl.float16)
    for component in tl.static_range(4):
        column = (column_of >> (16 * component)).to(tl.int16).to(tl.int32)[:, :, None] - COLUMN_TILE * WIDTH
        value = (values >> (16 * component)).to(tl.int16).to(tl.float16, bitcast=True)
        rows = tl.where(column == tl.arange(0, WIDTH)[None, None, :], value[:, :, None], rows)
    tile = tl.dot(is_token, rows).to(tl.float16)
    if TRANSPOSED:
        tile = tl.trans(tile, 0, 2, 1)
    return tile


@triton.constexpr_function
def has_channel_order(constants: OutlierConstants) -> bool:
    return constants.components is None


@triton.constexpr_function
def tiles_per_patch(constants: OutlierConstants) -> int:
    """Return the number of tiles per patch. Without patches, return the number of all tiles."""
    return constants.patch_tiles or constants.tiles


@triton.jit
def outlier_tile(
    entries: tl.tuple,
    loaded: tl.tuple,
    positions: tl.tensor,
    after: tl.tensor,
    TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr,
    CONSTANTS: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return the outliers in tile ``COLUMN_TILE`` of the codec, ``[warp, token, column]`` or transposed. Call ``write_patch`` first."""
    if FAST and CONSTANTS.patch_tiles > 0:
        tile = _read_tile(entries, positions, after, COLUMN_TILE, CONSTANTS, TOKENS)
    else:
        tile = _compute_tile(entries, loaded, TILE, COLUMN_TILE, CONSTANTS, WARPS, TOKENS, TRANSPOSED)
    return tile
