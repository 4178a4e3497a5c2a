"""Work of an attention program: its row of the work table, the tokens' packed rows, and the tiles loaded from them."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.bitpack.tile_layout import second_token_offset
from kvpack.kernels.loaders.qjl import load_signs

FIRST_ADDRESS = tl.constexpr(6)
"""Number of integers per row of the work table before the addresses: the fields of ``WorkItem`` before its streams."""

POSITION_BIAS = tl.constexpr(1 << 20)
"""Number added to both sides of token comparisons, so that the compiler does not compute addresses from the compared positions.

Otherwise, the loop would keep one number per tile row and add it to each pointer, instead of adding one sum and a constant offset.
"""

STREAM_INTEGERS = tl.constexpr(3)
"""Integers per stream in a row of the work table: an address, and the batch and head strides in bytes."""


class PackedRows(NamedTuple):
    """Packed rows of keys or values: pointers to the head's first row in each stream, and ``first``, the row of the first token."""

    streams: Any
    first: Any


class WorkItem(NamedTuple):
    """The tokens of a program: ``count`` tokens, beginning with token ``begin`` of the layer.

    Every query attends to the first ``whole`` of these tokens, a multiple of the tokens that the program processes together. If keys have
    page means, ``means`` contains their streams and the program's first token, counted from the start of its first page.
    """

    begin: Any
    count: Any
    whole: Any
    means: Any
    k: Any
    v: Any


@triton.jit
def load_work(row: tl.tensor, batch: tl.tensor, head: tl.tensor, K: tl.constexpr, V: tl.constexpr) -> tl.tuple:
    """Load the ``WorkItem`` of one sequence and KV head from ``row``, int64 ``[FIRST_ADDRESS + STREAM_INTEGERS * streams]``.

    The row lists the streams of keys, then of values, then of page means.
    """
    begin = tl.load(row)
    count = tl.load(row + 1).to(tl.int32)
    whole = tl.load(row + 2).to(tl.int32)
    k_first = tl.load(row + 3)
    v_first = tl.load(row + 4)
    k_streams = stream_pointers(row + FIRST_ADDRESS, batch, head, K)
    v_streams = stream_pointers(row + FIRST_ADDRESS + STREAM_INTEGERS * len(K.streams), batch, head, V)
    means = PackedRows((), 0)
    if K.means is not None:
        MEANS: tl.constexpr = K.means
        address = row + FIRST_ADDRESS + STREAM_INTEGERS * (len(K.streams) + len(V.streams))
        means = PackedRows(stream_pointers(address, batch, head, MEANS), tl.load(row + 5))
    return WorkItem(begin, count, whole, means, PackedRows(k_streams, k_first), PackedRows(v_streams, v_first))


@triton.jit
def stream_pointers(row: tl.tensor, batch: tl.tensor, head: tl.tensor, SIDE: tl.constexpr) -> tl.tuple:
    pointers = ()
    for number in tl.static_range(len(SIDE.streams)):
        at = row + STREAM_INTEGERS * number
        pointers = pointers + (_pointer(at, batch, head, SIDE.streams[number].bits, SIDE.streams[number].aligned),)
    return pointers


@triton.jit
def _pointer(at: tl.tensor, batch: tl.tensor, head: tl.tensor, BITS: tl.constexpr, ALIGNED: tl.constexpr) -> tl.tensor:
    address = tl.load(at) + batch * tl.load(at + 1) + head * tl.load(at + 2)
    if BITS == 8:
        pointer = address.to(tl.pointer_type(tl.int8))
    elif BITS == 16:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int32))
    return tl.multiple_of(pointer, ALIGNED)


@triton.jit
def limit_to_length(
    work: tl.tuple,
    length: tl.tensor,
    position: tl.tensor,
    ahead: tl.tensor,
    window: tl.tensor,
    SPAN: tl.constexpr,
    TILES: tl.constexpr,
) -> tl.tuple:
    """Limit ``work`` to a sequence of ``length`` tokens. Also returns the number of its tokens before the first query's window.

    The first query is at ``position``. A query attends to tokens up to ``ahead`` positions after its own. The number of preceding tokens is
    rounded down to whole tiles of ``SPAN`` tokens, and ``work.whole`` to a multiple of ``TILES`` tiles.
    """
    count = tl.maximum(0, tl.minimum(work.count, length - work.begin)).to(tl.int32)
    skipped = tl.maximum(0, position - window + 1 - work.begin).to(tl.int32) // SPAN * SPAN
    seen = tl.maximum(0, tl.minimum(count, position + 1 + ahead - work.begin)).to(tl.int32)
    whole = tl.minimum(work.whole, seen // (TILES * SPAN) * (TILES * SPAN))
    return WorkItem(work.begin, count, whole, work.means, work.k, work.v), skipped


@triton.jit
def skip_unseen(work: tl.tuple, first: tl.tensor, last: tl.tensor, SPAN: tl.constexpr, TILES: tl.constexpr) -> tl.tuple:
    """Skip the tokens at the beginning of ``work`` that are visible to no query.

    Tokens before token ``first`` of the layer are visible to no query, and tokens before token ``last`` only to some. The returned work
    begins with the first tile that is visible to all queries. Tokens that only some queries attend to come before this tile and have
    negative positions; the second result is their number, a multiple of the tile size ``SPAN``. Tiles that are visible to all queries are
    processed ``TILES`` at a time.
    """
    begin = tl.maximum(0, first - work.begin) // SPAN * SPAN
    shift = (tl.maximum(0, last - work.begin) + TILES * SPAN - 1) // (TILES * SPAN) * (TILES * SPAN)
    count = tl.where(begin < work.count, work.count, 0)
    begin = tl.where(begin < work.count, begin, 0).to(tl.int32)
    # If no tile is visible to all queries, the work begins with the first tile that some of them see.
    whole = tl.maximum(0, tl.minimum(work.whole, count) - shift).to(tl.int32)
    shift = tl.where(whole > 0, shift, begin).to(tl.int32)
    k = PackedRows(work.k.streams, work.k.first + shift)
    v = PackedRows(work.v.streams, work.v.first + shift)
    means = PackedRows(work.means.streams, work.means.first + shift)
    return WorkItem(work.begin + shift, count - shift, whole, means, k, v), shift - begin


@triton.jit
def prefetch(work: tl.tuple, offset: tl.tensor, K: tl.constexpr, V: tl.constexpr, DISTANCE: tl.constexpr, TOKENS: tl.constexpr) -> None:
    """Prefetch the rows of up to ``TOKENS`` tokens into the L2 cache, beginning ``DISTANCE`` tokens after token ``offset`` of ``work``."""
    _prefetch_side(work.k, offset, work.count, K, DISTANCE, TOKENS)
    _prefetch_side(work.v, offset, work.count, V, DISTANCE, TOKENS)


@triton.jit
def _prefetch_side(
    rows: tl.tuple, offset: tl.tensor, count: tl.tensor, SIDE: tl.constexpr, DISTANCE: tl.constexpr, TOKENS: tl.constexpr
) -> None:
    first = rows.first + offset + DISTANCE
    tokens = tl.minimum(count - offset - DISTANCE, TOKENS)
    for number in tl.static_range(len(SIDE.streams)):
        if SIDE.streams[number].row_bytes:
            _prefetch_stream(rows.streams[number], first, tokens, SIDE.streams[number].row_bytes, SIDE.streams[number].tokens)


@triton.jit
def _prefetch_stream(pointer: tl.tensor, first: tl.tensor, tokens: tl.tensor, ROW_BYTES: tl.constexpr, ROW_TOKENS: tl.constexpr) -> None:
    """Prefetch rows in pieces of 16 bytes. One thread makes all requests, which is faster than requests by all threads."""
    begin = pointer.to(tl.int64) + first // ROW_TOKENS * ROW_BYTES
    tl.inline_asm_elementwise(
        """{ .reg .pred real; .reg .b32 thread, size; .reg .b64 begin;
            mov.u32 thread, %tid.x; and.b32 size, $2, -16; setp.gt.s32 real, size, 0; setp.eq.and.b32 real, thread, 0, real;
            and.b64 begin, $1, -16; @real cp.async.bulk.prefetch.L2.global [begin], size; mov.u32 $0, 0; }""",
        "=r,l,r",
        [begin, (tokens * ROW_BYTES // ROW_TOKENS).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_tiles(
    streams: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    end: tl.tensor,
    SIDE: tl.constexpr,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tuple:
    """Load ``TILES`` tiles of ``TOKENS`` tokens: the rows of codes and, if there are QJL signs, the rows of signs.

    ``token`` ``[warp, token]`` are the tokens of each warp's first tile, counted from row ``first``. With ``MASKED``, tokens at ``end`` or
    later are not loaded. Dual loaders load half as many tiles, each with twice as many tokens.
    """
    MODE: tl.constexpr = SIDE.mode
    CONSTANTS: tl.constexpr = SIDE.constants
    SIGNS: tl.constexpr = SIDE.signs
    loaded = ()
    for tile in tl.static_range(TILES // 2 if SIDE.dual else TILES):
        at = token + tile * (2 * TOKENS if SIDE.dual else TOKENS)
        beyond = at + POSITION_BIAS
        valid = (
            (beyond < end + POSITION_BIAS, beyond + second_token_offset(SIDE.dual, TOKENS) < end + POSITION_BIAS)
            if SIDE.dual
            else beyond < end + POSITION_BIAS
        )
        parts = (SIDE.load(streams, first, at, valid, CONSTANTS, MASKED, MODE),)
        if SIDE.signs is not None:
            parts = parts + (load_signs(streams, first, at, valid, SIGNS, MASKED, MODE),)
        loaded = loaded + (parts,)
    return loaded
