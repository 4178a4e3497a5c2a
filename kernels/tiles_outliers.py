"""outliers beside the tiles of a codec (spec/side-cars.md): what they differ by from what the codec decodes to, as tiles of its columns.

A page's outliers are listed by sequence, head and token (``outlier_entries``). Those of a warp's tile are put into zeros in shared
memory, each where its token's row meets its columns; the matrix units read that patch as they read a tile of the codec, and its
places are zeros again. Triton has no operation that puts values there: it is inline PTX, as lookups are (``shared_table``).
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
from triton import language as tl

from .axes import of_columns, of_tokens
from .tiles import Stream, Tiles

BOUNDS, PLACES, VALUES, POWER, COLUMNS = "outlier_bounds", "outlier_places", "outlier_values", "outlier_power", "outlier_columns"
"""Streams that no file has: where the entries of a granule of tokens begin, ``entries``, and ``columns_of``."""

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


def entries(token: torch.Tensor, chunk: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places, int32; the values ``[entry, 4]`` in binary16 over a power of two, two in an int32; and that power, float32.

    It is about the root of the largest value, and the weights of values are multiplied by it: neither then leaves binary16.
    """
    power = torch.ldexp(torch.ones((), device=values.device), (torch.frexp(values.abs().amax()).exponent // 2).clamp(-8, 8))
    place = token % TOKENS_TOLD_APART.value + TOKENS_TOLD_APART.value * chunk
    return place.to(torch.int32), (values / power).to(torch.float16).view(torch.int32), power


def with_outliers(tiles: Tiles) -> Tiles:
    """The loader ``tiles`` of a codec with its outliers."""
    columns = tuple(Stream(name, bits, 0) for name, bits in ((BOUNDS, 32), (PLACES, 32), (VALUES, 32), (POWER, 32), (COLUMNS, 16)))
    return replace(
        tiles,
        streams=(*tiles.streams, *columns),
        most_tokens=min(tiles.most_tokens, 32),
        loads_ahead=False,
        outliers=(len(tiles.streams), tuple(map(len, tiles.channels)), _columns(tiles) == list(range(len(_columns(tiles))))),
    )


def _columns(tiles: Tiles) -> list[int]:
    """The column of each channel, counted over all tiles."""
    channels = [channel for part in tiles.channels for channel in part]
    return [channels.index(channel) for channel in range(max(channels) + 1)]


@lru_cache(maxsize=256)
def columns_of(tiles: Tiles, device: str) -> torch.Tensor:
    """The stream ``COLUMNS`` of the tiles of a codec alone: ``_columns`` as int16 ``[1, 1, channels]``."""
    return torch.tensor(_columns(tiles), dtype=torch.int16, device=device)[None, None]


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
def _bounds(own: tl.tuple, first: tl.tensor, last: tl.tensor, WARPS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tuple:
    """Of the granules of each warp's ``TOKENS`` tokens from row ``first`` on: the first entry, and the one after the last."""
    bounds = ()
    first, last = first.to(tl.int32), last.to(tl.int32)
    # Loads of single numbers: those of tensors make compiling slow.
    for warp in tl.static_range(WARPS):
        begin = tl.load(own[0] + tl.minimum(first + warp * TOKENS, last) // GRANULE)
        end = tl.load(own[0] + (tl.minimum(first + (warp + 1) * TOKENS, last) + (GRANULE - 1)) // GRANULE)
        bounds = bounds + (begin, end)
    return bounds


@triton.jit
def _load(own: tl.tuple, begins: tl.tensor, counts: tl.tensor, ENTRIES: tl.constexpr) -> tl.tuple:
    """``ENTRIES`` of each warp's ``counts`` entries from ``begins`` on, ``[warp, entry]``: places, -1 where there are none, and values,
    four in an int64.
    """
    number = tl.arange(0, ENTRIES)[None, :]
    real = number < counts
    place = tl.load(own[1] + (begins + number), real, -1)
    values = tl.load(own[2].to(tl.pointer_type(tl.int64)) + (begins + number), real, 0)
    return place, values


@triton.jit
def _loaded(own: tl.tuple, bounds: tl.tuple, WARPS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tuple:
    """What is in ``bounds``: as many entries as a thread easily holds, the numbers of others of each warp and where they begin, and the
    most entries of a warp.
    """
    ENTRIES: tl.constexpr = 2 * TOKENS
    most = 0
    warp = tl.arange(0, WARPS)[:, None]
    begins, counts = tl.zeros((WARPS, 1), tl.int32), tl.zeros((WARPS, 1), tl.int32)
    for number in tl.static_range(WARPS):
        count = bounds[2 * number + 1] - bounds[2 * number]
        begins, counts = tl.where(warp == number, bounds[2 * number], begins), tl.where(warp == number, count, counts)
        most = tl.maximum(most, count)
    return _load(own, begins, counts, ENTRIES), begins + ENTRIES, counts - ENTRIES, most


@triton.jit
def first_entries(
    pointers: tl.tuple, first: tl.tensor, last: tl.tensor, C: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr
) -> tl.tuple:
    """The entries of each warp's ``TOKENS`` tokens from row ``first`` on, and the bounds of those of the tokens that follow."""
    ahead = ()
    if C is not None:
        own = pointers[C[0] :]
        entries = _loaded(own, _bounds(own, first, last, WARPS, TOKENS), WARPS, TOKENS)
        ahead = (entries, _bounds(own, first + WARPS * TOKENS, last, WARPS, TOKENS))
    return ahead


@triton.jit
def next_entries(
    ahead: tl.tuple,
    pointers: tl.tuple,
    first: tl.tensor,
    last: tl.tensor,
    C: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tuple:
    """What ``first_entries`` gives for the tokens that follow those from row ``first`` on: loaded while these are attended."""
    if C is not None:
        own = pointers[C[0] :]
        entries = _loaded(own, ahead[1], WARPS, TOKENS)
        ahead = (entries, _bounds(own, first + 2 * WARPS * TOKENS, last, WARPS, TOKENS))
    return ahead


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
    FIRST: tl.constexpr = NUMBER // _together(C) * _together(C)
    STRIDE: tl.constexpr = _stride(_patch(C[1], FIRST, _together(C))[1], TOKENS, TURNED)
    WIDTH: tl.constexpr = _patch(C[1], NUMBER, 1)[1]
    row = tl.load(numbers + tl.arange(0, TOKENS)[None, :]).to(tl.int32)
    column = tl.load(numbers + tl.arange(0, WIDTH)[None, :]).to(tl.int32)
    if TURNED:
        place = of_tokens(row * 2, TURNED) + of_columns(column * STRIDE, TURNED)
    else:
        place = of_tokens(row * STRIDE, TURNED) + of_columns(column * 2, TURNED)
    if WARPS > 1:
        place += tl.load(numbers + tl.arange(0, WARPS)[:, None, None]).to(tl.int32) * C[4]
    return place


@triton.jit
def entries_of(
    ahead: tl.tuple, pointers: tl.tuple, first: tl.tensor, places: tl.tuple, C: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr
) -> tl.tuple:
    """What patches of the tokens from row ``first`` on are made of.

    Pointers, entries, the place of each warp's first token, and ``places``.
    """
    found = ()
    if C is not None:
        token = (first + tl.arange(0, WARPS)[:, None] * TOKENS).to(tl.int32)
        found = (pointers[C[0] :], ahead[0], token, places)
    return found


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
    row = ((place - entries[2] + GRANULE) & (TOKENS_TOLD_APART - 1)) - (GRANULE + TILE * TOKENS)
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
def _put_all(
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
    """Two values side by side; what the second one's address and the zeros of ``_put_all`` are does not matter."""
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
    """``_tile`` from shared memory."""
    AT: tl.constexpr = _patch(C[1], NUMBER, 1)[0] - PATCH[0]
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
    """``_tile`` without shared memory: the product of entries and a matrix that is 1 where one is of a token."""
    FIRST: tl.constexpr = _patch(C[1], NUMBER, 1)[0]
    WIDTH: tl.constexpr = _patch(C[1], NUMBER, 1)[1]
    place, values = loaded[0], loaded[1]
    row = ((place - entries[2] + GRANULE) & (TOKENS_TOLD_APART - 1)) - (GRANULE + TILE * TOKENS)
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
def _together(constants: tuple[Any, ...]) -> int:
    """Tiles of a patch, and all where there is none."""
    return constants[3] or len(constants[1])


@triton.constexpr_function
def _patch(widths: tuple[int, ...], first: int, together: int) -> tuple[int, int, int]:
    """(first column, columns, tiles) of the patch that begins with tile ``first``."""
    return sum(widths[:first]), sum(widths[first : first + together]), min(together, len(widths) - first)


@triton.jit
def _tile(
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


@triton.jit
def _patch_scores(
    products: tl.tensor,
    entries: tl.tuple,
    loaded: tl.tuple,
    q: tl.tuple,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    C: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """``products`` and those of the patch that begins with the codec's tile ``FIRST``."""
    PATCH: tl.constexpr = _patch(C[1], FIRST, _together(C))
    LENGTH: tl.constexpr = PATCH[2]
    WARPS: tl.constexpr = products.shape[0]
    TOKENS: tl.constexpr = products.shape[1]
    after = _put_all(entries, loaded, TILE, PATCH, C, TOKENS, False, False, FAST)
    for number in tl.static_range(LENGTH):
        tile = _tile(entries, loaded, after, TILE, FIRST + number, PATCH, C, WARPS, TOKENS, False, FAST)
        products = tl.dot(tile, q[FIRST + number], products)
    _put_all(entries, loaded, TILE, PATCH, C, TOKENS, False, True, FAST)
    return products


@triton.jit
def _next(entries: tl.tuple, loaded: tl.tuple, at: tl.tensor) -> tl.tuple:
    """What is loaded after the entries from ``at`` on."""
    return _load(entries[0], entries[1][1] + at, entries[1][2] - at, loaded[0].shape[1])


@triton.jit
def add_outlier_scores(
    scores: tl.tensor, entries: tl.tuple, q: tl.tuple, TILE: tl.constexpr, C: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    """``scores`` ``[warp, token, row]`` of a warp's tile ``TILE`` and the products of its outliers with the query."""
    TILES: tl.constexpr = len(C[1])
    TOGETHER: tl.constexpr = _together(C)
    most = entries[1][3]
    # Seldom more than once: a loop right inside that over tiles would keep their loads from being fetched ahead of time.
    if most > 0:
        products = tl.zeros(scores.shape, tl.float32)
        loaded = entries[1][0]
        for at in tl.range(0, most, loaded[0].shape[1], num_stages=1):
            for first in tl.static_range(0, TILES, TOGETHER):
                products = _patch_scores(products, entries, loaded, q, TILE, first, C, FAST)
            loaded = _next(entries, loaded, at)
        scores += products * entries[3][1]
    return scores


@triton.jit
def _patch_values(
    sums: tl.tuple,
    entries: tl.tuple,
    loaded: tl.tuple,
    weights: tl.tensor,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    C: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The sums that the patch adds to, which begins with the codec's tile ``FIRST``."""
    PATCH: tl.constexpr = _patch(C[1], FIRST, _together(C))
    LENGTH: tl.constexpr = PATCH[2]
    WARPS: tl.constexpr = weights.shape[0]
    TOKENS: tl.constexpr = weights.shape[1]
    new = ()
    after = _put_all(entries, loaded, TILE, PATCH, C, TOKENS, True, False, FAST)
    for number in tl.static_range(LENGTH):
        tile = _tile(entries, loaded, after, TILE, FIRST + number, PATCH, C, WARPS, TOKENS, True, FAST)
        new = new + (tl.dot(tile, weights, sums[FIRST + number]),)
    _put_all(entries, loaded, TILE, PATCH, C, TOKENS, True, True, FAST)
    return new


@triton.jit
def add_outlier_values(
    sums: tl.tuple, entries: tl.tuple, weights: tl.tensor, TILE: tl.constexpr, C: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """``sums`` and those of the outliers of a warp's tile ``TILE``, times ``weights`` ``[warp, token, row]`` of at most 2^7."""
    TILES: tl.constexpr = len(C[1])
    TOGETHER: tl.constexpr = _together(C)
    most = entries[1][3]
    if most > 0:
        scaled = (weights * entries[3][1]).to(tl.float16)
        loaded = entries[1][0]
        for at in tl.range(0, most, loaded[0].shape[1], num_stages=1):
            new = ()
            for first in tl.static_range(0, TILES, TOGETHER):
                new = new + _patch_values(sums, entries, loaded, scaled, TILE, first, C, FAST)
            for number in tl.static_range(TILES, len(sums)):
                new = new + (sums[number],)
            sums = new
            loaded = _next(entries, loaded, at)
    return sums
