"""Outliers of a warp's tile as one more tile, in shared memory: inline PTX, for Triton has no operation that puts values there.

They are put into zeros, each where its token's row meets its columns; the matrix units read that patch as they read a tile of the
codec, and its places are zeros again. Where the assembly is off (``FAST`` false, or memory is short) the same tile is a product.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
from triton import language as tl

from .axes import of_columns, of_tokens

if TYPE_CHECKING:
    from .tiles import Tiles

GRANULE = tl.constexpr(32)
"""Tokens of which the entries lie together in the order of their tokens."""

TOKENS_TOLD_APART = tl.constexpr(128)
"""By an entry's place: more than a warp's tile and the granules that it begins and ends in."""

STATIC_SHARED_BYTES = 47 << 10
"""That a kernel may declare, patches and tables together: 48 KiB, of which the system takes one."""

ZEROED_BYTES = 512
"""By a warp's threads at once, 16 each."""

PADDING_BYTES = 16
"""After each row of a patch: the matrix units' eight rows then lie in different banks."""


def in_patches(k: Tiles, v: Tiles, warps: int, tokens: int, table_bytes: int) -> tuple[tuple[Any, ...] | None, tuple[Any, ...] | None, int]:
    """The constants of both sides, if they have outliers, and the bytes that the patches of all warps take.

    A patch holds as many of a side's tiles as fit beside tables of ``table_bytes``; 0 where not even one does: it is then made without.
    """
    limit = (STATIC_SHARED_BYTES - table_bytes) // warps // ZEROED_BYTES * ZEROED_BYTES
    together, most = [], 0
    for tiles, turned in ((k, False), (v, True)):
        widths = tiles.outliers[1] if tiles.outliers else ()
        sizes = {
            count: max(_bytes(sum(widths[at : at + count]), tokens, turned) for at in range(0, len(widths), count))
            for count in range(1, len(widths) + 1)
        }
        together.append(max((count for count, size in sizes.items() if size <= limit), default=0))
        most = max(most, sizes.get(together[-1], 0))
    most = -(-most // ZEROED_BYTES) * ZEROED_BYTES
    k_constants = None if k.outliers is None else (*k.outliers, together[0], most)
    v_constants = None if v.outliers is None else (*v.outliers, together[1], most)
    return k_constants, v_constants, most * warps


def _bytes(columns: int, tokens: int, turned: bool) -> int:
    rows, row = (columns, tokens) if turned else (tokens, columns)
    return rows * (2 * row + PADDING_BYTES)


@triton.constexpr_function
def _declare(size: int, threads: int) -> str:
    stores = "".join(f"st.shared.v4.b32 [at + {place}], {{zero, zero, zero, zero}};" for place in range(0, size, 16 * threads))
    return f"""
        .shared .align 16 .b8 kvpack_patches[{size}];
        {{ .reg .b32 at, zero; mov.u32 at, kvpack_patches; mad.lo.u32 at, $1, 16, at; mov.u32 zero, 0; {stores} mov.u32 $0, 0; }}"""


@triton.jit
def declare_patches(SIZE: tl.constexpr, WARPS: tl.constexpr) -> None:
    """Reserve ``SIZE`` bytes of shared memory for patches, and put zeros there; once a kernel. ``tl.debug_barrier`` waits for it."""
    THREADS: tl.constexpr = 32 * WARPS
    thread = tl.arange(0, THREADS)
    tl.inline_asm_elementwise(_declare(SIZE, THREADS), "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def patch_places(
    pointers: tl.tuple, numbers: tl.tensor, C: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr, TURNED: tl.constexpr
) -> tl.tuple:
    """What does not change from tile to tile: zeros in memory, the power of two of values, and where each tile of a patch is read."""
    places = ()
    if C is not None:
        TILES: tl.constexpr = len(C[1])
        tiles = ()
        for number in tl.static_range(TILES):
            tiles = tiles + (_places_of_tile(numbers, number, C, WARPS, TOKENS, TURNED),)
        places = (numbers, tl.load(pointers[C[0] + 3]).to(tl.float32, bitcast=True), tiles)
    return places


@triton.jit
def _places_of_tile(
    numbers: tl.tensor, NUMBER: tl.constexpr, C: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr, TURNED: tl.constexpr
) -> tl.tensor:
    """Bytes from the first column of tile ``NUMBER`` in the patches; from loaded numbers (``fields.load_places``)."""
    FIRST: tl.constexpr = NUMBER // tiles_together(C) * tiles_together(C)
    STRIDE: tl.constexpr = _stride(patch_from(C[1], FIRST, tiles_together(C))[1], TOKENS, TURNED)
    WIDTH: tl.constexpr = patch_from(C[1], NUMBER, 1)[1]
    row = tl.load(numbers + tl.arange(0, TOKENS)[None, :]).to(tl.int32)
    column = tl.load(numbers + tl.arange(0, WIDTH)[None, :]).to(tl.int32)
    if TURNED:
        place = of_tokens(row * 2, TURNED) + of_columns(column * STRIDE, TURNED)
    else:
        place = of_tokens(row * STRIDE, TURNED) + of_columns(column * 2, TURNED)
    if WARPS > 1:
        place += tl.load(numbers + tl.arange(0, WARPS)[:, None, None]).to(tl.int32) * C[4]
    return place


@triton.constexpr_function
def _stride(columns: int, tokens: int, turned: bool) -> int:
    """Bytes of a row of a patch."""
    return 2 * (tokens if turned else columns) + PADDING_BYTES


@triton.constexpr_function
def _store_one() -> str:
    return """{ .reg .pred real; .reg .b32 at; mov.u32 at, kvpack_patches; add.u32 at, at, $1;
        setp.ge.s32 real, $1, 0; @real st.shared.b16 [at], $2; mov.u32 $0, 0; }"""


@triton.constexpr_function
def _store_chunk(apart: int) -> str:
    """Four values ``apart`` bytes from each other."""
    stores = "@real st.shared.b64 [at], $2;"
    if apart > 2:
        stores = "".join(f"@real st.shared.b16 [at + {number * apart}], value{number};" for number in range(4))
    return f"""{{ .reg .pred real; .reg .b32 at; .reg .b16 value<4>; mov.b64 {{value0, value1, value2, value3}}, $2;
        mov.u32 at, kvpack_patches; add.u32 at, at, $1; setp.ge.s32 real, $1, 0; {stores} mov.u32 $0, 0; }}"""


@triton.jit
def _row_of_tile(place: tl.tensor, entries: tl.tuple, TILE: tl.constexpr, TOKENS: tl.constexpr) -> tl.tensor:
    """The token of each place, counted from the first of a warp's tile ``TILE``; one of another tile is not in [0, ``TOKENS``)."""
    return ((place - entries[2] + GRANULE) & (TOKENS_TOLD_APART - 1)) - (GRANULE + TILE * TOKENS)


@triton.jit
def _put(
    entries: tl.tuple,
    loaded: tl.tuple,
    TILE: tl.constexpr,
    PATCH: tl.constexpr,
    C: tl.constexpr,
    TOKENS: tl.constexpr,
    TURNED: tl.constexpr,
    CLEAR: tl.constexpr,
) -> None:
    """Put entries that were ``loaded``, or with ``CLEAR`` zeros, into the patch of a warp's tile ``TILE``."""
    FIRST: tl.constexpr = PATCH[0]
    COLUMNS: tl.constexpr = PATCH[1]
    IN_ORDER: tl.constexpr = C[2]
    AREA: tl.constexpr = C[4]
    STRIDE: tl.constexpr = _stride(COLUMNS, TOKENS, TURNED)
    # Bytes from a token to the next, and from a column to the next.
    TOKEN: tl.constexpr = 2 if TURNED else STRIDE
    COLUMN: tl.constexpr = STRIDE if TURNED else 2
    place = loaded[0]
    row = _row_of_tile(place, entries, TILE, TOKENS)
    chunk = place // TOKENS_TOLD_APART
    real = (place >= 0) & (row >= 0) & (row < TOKENS)
    own = tl.arange(0, place.shape[0])[:, None] * AREA + row * TOKEN
    values = loaded[1]
    if CLEAR:
        values = tl.zeros(values.shape, tl.int64)
    if IN_ORDER:
        column = 4 * chunk - FIRST
        if len(C[1]) > C[3]:
            real = real & (column >= 0) & (column < COLUMNS)
        at = tl.where(real, own + column * COLUMN, -1)
        tl.inline_asm_elementwise(_store_chunk(COLUMN), "=r,r,l", [at, values], dtype=tl.int32, is_pure=False, pack=1)
    else:
        # Four columns, those of a chunk, are one integer.
        column_of = tl.load(entries[0][4].to(tl.pointer_type(tl.int64)) + chunk, real, 0)
        for component in tl.static_range(4):
            column = (column_of >> (16 * component)).to(tl.int16).to(tl.int32) - FIRST
            at = tl.where(real & (column >= 0) & (column < COLUMNS), own + column * COLUMN, -1)
            half = (values >> (16 * component)).to(tl.int16)
            tl.inline_asm_elementwise(_store_one(), "=r,r,h", [at, half], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put_all(
    entries: tl.tuple,
    loaded: tl.tuple,
    TILE: tl.constexpr,
    PATCH: tl.constexpr,
    C: tl.constexpr,
    TOKENS: tl.constexpr,
    TURNED: tl.constexpr,
    CLEAR: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """``_put``, if ``FAST``, between what other lanes of a warp read; what reads the patch takes the result, a zero, and so comes after."""
    after = 0
    if FAST and C[3] > 0:
        _wait(entries)
        _put(entries, loaded, TILE, PATCH, C, TOKENS, TURNED, CLEAR)
        after = _wait(entries)
    return after


@triton.jit
def _wait(entries: tl.tuple) -> tl.tensor:
    """For all that put into a patch or read it; a zero."""
    WARPS: tl.constexpr = entries[2].shape[0]
    if WARPS > 1:
        tl.debug_barrier()
    return tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r,r", [entries[1][3]], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.constexpr_function
def _read(offset: int) -> str:
    """Two values side by side; what the second one's address and the zeros of ``put_all`` are does not matter."""
    return f"{{ .reg .b32 at; mov.u32 at, kvpack_patches; add.u32 at, at, $1; ld.shared.b32 $0, [at + {offset}]; }}"


@triton.jit
def _patch_tile(
    entries: tl.tuple,
    after: tl.tensor,
    NUMBER: tl.constexpr,
    PATCH: tl.constexpr,
    C: tl.constexpr,
    TOKENS: tl.constexpr,
    TURNED: tl.constexpr,
) -> tl.tensor:
    """``outlier_tile`` from shared memory."""
    AT: tl.constexpr = patch_from(C[1], NUMBER, 1)[0] - PATCH[0]
    COLUMN: tl.constexpr = _stride(PATCH[1], TOKENS, TURNED) if TURNED else 2
    # A load from there comes after what gave ``after``.
    zero = tl.load(entries[3][0] + after + tl.zeros((1, 1, 1), tl.int32)).to(tl.int32)
    place = entries[3][2][NUMBER]
    return tl.inline_asm_elementwise(_read(AT * COLUMN), "=r,r,r,r,r", [place, zero], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _slow_tile(
    entries: tl.tuple,
    loaded: tl.tuple,
    TILE: tl.constexpr,
    NUMBER: tl.constexpr,
    C: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    TURNED: tl.constexpr,
) -> tl.tensor:
    """``outlier_tile`` without shared memory: the product of entries and a matrix that is 1 where one is of a token."""
    FIRST: tl.constexpr = patch_from(C[1], NUMBER, 1)[0]
    WIDTH: tl.constexpr = patch_from(C[1], NUMBER, 1)[1]
    place, values = loaded[0], loaded[1]
    row = _row_of_tile(place, entries, TILE, TOKENS)
    real = place >= 0
    of_token = tl.where(real[:, None, :] & (row[:, None, :] == tl.arange(0, TOKENS)[None, :, None]), 1.0, 0.0).to(tl.float16)
    column_of = tl.load(entries[0][4].to(tl.pointer_type(tl.int64)) + place // TOKENS_TOLD_APART, real, 0)
    rows = tl.zeros((WARPS, place.shape[1], WIDTH), tl.float16)
    for component in tl.static_range(4):
        column = (column_of >> (16 * component)).to(tl.int16).to(tl.int32)[:, :, None] - FIRST
        value = (values >> (16 * component)).to(tl.int16).to(tl.float16, bitcast=True)
        rows = tl.where(column == tl.arange(0, WIDTH)[None, None, :], value[:, :, None], rows)
    tile = tl.dot(of_token, rows).to(tl.float16)
    if TURNED:
        tile = tl.trans(tile, 0, 2, 1)
    return tile


@triton.constexpr_function
def tiles_together(constants: tuple[Any, ...]) -> int:
    """Tiles of a patch, and all where there is none."""
    return constants[3] or len(constants[1])


@triton.constexpr_function
def patch_from(widths: tuple[int, ...], first: int, together: int) -> tuple[int, int, int]:
    """(first column, columns, tiles) of the patch that begins with tile ``first``."""
    return sum(widths[:first]), sum(widths[first : first + together]), min(together, len(widths) - first)


@triton.jit
def outlier_tile(
    entries: tl.tuple,
    loaded: tl.tuple,
    after: tl.tensor,
    TILE: tl.constexpr,
    NUMBER: tl.constexpr,
    PATCH: tl.constexpr,
    C: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """The codec's tile ``NUMBER``, which is in ``PATCH``: ``[warp, token, column]``, or turned, ``[warp, column, token]``."""
    if FAST and C[3] > 0:
        tile = _patch_tile(entries, after, NUMBER, PATCH, C, TOKENS, TURNED)
    else:
        tile = _slow_tile(entries, loaded, TILE, NUMBER, C, WARPS, TOKENS, TURNED)
    return tile
