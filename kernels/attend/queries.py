"""A block of query rows, laid out for the matrix units next to tiles of keys."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.bitpack.token_factors import finite_factor
from kvpack.kernels.loaders.qjl import half_sum, queries_of_bits


class Queries(NamedTuple):
    """The query rows of a program.

    ``tiles`` are ``[warp, column, row]``, matching the key tiles that they are multiplied with (``_query_tiles``). The other fields are
    ``[1, 1, row]``: ``half_sum`` is the part of the query sum that signs need (``qjl.half_sum``), ``offset`` is added to all scores of the
    row, or 0, ``scale`` multiplies its scores, ``position`` is its token, and ``second`` is set if its scores belong to the second of two
    tokens in a tile's row. ``products`` points to its product with the mean of page 0 (``key_mean.load_products``); each of the ``pages``
    has ``padded`` products. Without means, these are unused.
    """

    tiles: Any
    half_sum: Any
    offset: Any
    scale: Any
    position: Any
    second: Any
    products: Any
    pages: Any
    padded: Any


@triton.constexpr_function
def sum_of(numbers: tuple[int, ...]) -> int:
    """Return the sum of ``numbers`` at compile time."""
    return sum(numbers)


@triton.jit
def load_queries(
    q: tl.tensor,
    scales: tl.tensor,
    products: tl.tensor,
    pages: tl.tensor,
    sequence: tl.tensor,
    block: tl.tensor,
    row_blocks: tl.tensor,
    position: tl.tensor,
    q_len: tl.tensor,
    K: tl.constexpr,
    DUAL: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Load the ``Queries`` of a block of ``BLOCK`` rows of one sequence and KV head.

    ``q`` is float32 ``[sequence, column, padded row]`` and ``scales`` float32 ``[sequence, padded row]``; a sequence is one batch entry and
    one KV head. With ``DUAL``, tiles hold two tokens per row: every query row occurs twice, ``ROWS`` in all, first for the first token.
    """
    # Triton 3.6 takes tuples and text as arguments of functions only where they have a name.
    WIDTHS: tl.constexpr = K.widths
    SIGNS: tl.constexpr = K.signs
    SETS: tl.constexpr = 2 if DUAL and not K.dual else 1
    padded = row_blocks * BLOCK
    row = tl.arange(0, ROWS)  # [row]
    second = (row >= ROWS // 2)[None, None, :]  # [1, 1, row]
    if DUAL:
        row = row % (ROWS // 2)
    row += block * BLOCK
    begin = q + sequence.to(tl.int64) * K.columns * padded
    tiles = _query_tiles(begin, row, second, padded, K, DUAL, WARPS)  # [warp, column, row] each
    of_signs = 0.0
    if SIGNS is not None:
        tiles = queries_of_bits(tiles, SIGNS, SETS)
        of_signs = half_sum(tiles, SIGNS, SETS)
    offset = 0.0
    if K.offset:
        offset = tl.load(begin + sum_of(WIDTHS) * padded + row)[None, None, :]
    scale = tl.load(scales + sequence * padded + row)[None, None, :]  # [1, 1, row]
    of_pages = 0
    if K.means is not None:
        of_pages = (products + sequence.to(tl.int64) * pages * padded + row)[None, None, :]
    return Queries(tiles, of_signs, offset, scale, position + (row % q_len)[None, None, :], second, of_pages, pages, padded)


@triton.jit
def relative_to(queries: tl.tuple, token: tl.tensor) -> tl.tuple:
    """Return the queries with int32 positions relative to ``token``."""
    position = (queries.position - token).to(tl.int32)
    return Queries(
        queries.tiles, queries.half_sum, queries.offset, queries.scale, position, queries.second,
        queries.products, queries.pages, queries.padded,
    )  # fmt: skip


@triton.jit
def scaled(queries: tl.tuple, scale: tl.tensor) -> tl.tuple:
    """Return the queries with another ``scale``, which is made finite."""
    return Queries(
        queries.tiles, queries.half_sum, queries.offset, finite_factor(scale), queries.position, queries.second,
        queries.products, queries.pages, queries.padded,
    )  # fmt: skip


@triton.jit
def _query_tiles(
    q: tl.tensor,
    row: tl.tensor,
    second: tl.tensor,
    stride: tl.tensor,
    K: tl.constexpr,
    DUAL: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """Return the query in the key tiles' column order, ``[warp, column, row]`` per tile; for bf16 keys, a high and a low half each.

    With ``DUAL``, rows that are not ``second`` belong to the first of two tokens: to its columns of a tile if the keys are dual, else to a
    first set of tiles.
    """
    WIDTHS: tl.constexpr = K.widths
    tiles = ()
    for number in tl.static_range(2 * len(WIDTHS) if DUAL and not K.dual else len(WIDTHS)):
        if number == len(WIDTHS):
            q -= sum_of(WIDTHS) * stride
        tile = _query_tile(
            q, row, second == (number >= len(WIDTHS)), stride,
            WIDTHS[number % len(WIDTHS)], K.dual, K.interleave, DUAL, WARPS,
        )  # fmt: skip
        if K.dtype == "bf16":
            high = tile.to(tl.bfloat16)
            tiles = tiles + (high, (tile - high.to(tl.float32)).to(tl.bfloat16))
        elif K.dtype == "fp16":
            tiles = tiles + (tile.to(tl.float16),)
        else:
            tiles = tiles + (tile,)
        q += WIDTHS[number % len(WIDTHS)] * stride
    return tiles


@triton.jit
def _query_tile(
    q: tl.tensor,
    row: tl.tensor,
    own: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    DUAL_KEYS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    DUAL: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """Return one tile ``[warp, column, row]``.

    With ``DUAL`` it is zero except in rows that are ``own``; with ``DUAL_KEYS``, in those rows the first token's columns are set, and in
    the others the second's.
    """
    column = tl.arange(0, 2 * WIDTH if DUAL_KEYS else WIDTH)[None, :, None]  # [1, column, 1]
    number = column // (2 * INTERLEAVE) * INTERLEAVE + column % INTERLEAVE if DUAL_KEYS else column
    tile = tl.load(q + number * stride + row[None, None, :])  # [1, column, row]
    if DUAL_KEYS:
        tile = tl.where((column // INTERLEAVE % 2 == 0) == own, tile, 0)
    elif DUAL:
        tile = tl.where(own, tile, 0)
    return tl.broadcast_to(tile, (WARPS, column.shape[1], row.shape[0]))
