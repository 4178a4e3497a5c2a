"""Blocks of query rows, laid out for matrix products with tiles of keys."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.bitpack.token_factors import finite_factor
from kvpack.kernels.loaders.qjl import half_sum, scale_sign_queries


class Queries(NamedTuple):
    """The query rows of a program, in registers.

    ``tiles`` are ``[warp, column, row]``, in the column order of key tiles (``_query_tiles``). The other tensors have shape ``[1, 1,
    row]``:

    - ``half_sum``: half the sum of the query's sign columns (``qjl.half_sum``); 0 without signs;
    - ``offset``: a number to add to all scores of the row;
    - ``scale``: the factor of the row's scores;
    - ``position``: the token position of the row's query;
    - ``is_second``: True if the row's scores belong to the second token of a dual tile's rows;
    - ``products``: the address of the row's product with the mean of the program's first page, unused without means. The program has
      ``pages`` pages, whose products are ``stride`` products apart (``key_mean.load_products``).
    """

    tiles: Any
    half_sum: Any
    offset: Any
    scale: Any
    position: Any
    is_second: Any
    products: Any
    pages: Any
    stride: Any


@triton.constexpr_function
def constexpr_sum(numbers: tuple[int, ...]) -> int:
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
    PAIRED: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Load the ``Queries`` of a block of ``BLOCK`` rows of one sequence and KV head.

    ``q`` is float32 ``[sequence, column, padded row]``, and ``scales`` is float32 ``[sequence, padded row]``. Here, a sequence is one batch
    entry and one KV head. With ``DUAL``, a tile row contains two tokens, so each query row occurs twice among the ``ROWS`` rows, once per
    token.
    """
    # Triton 3.6 accepts tuples and strings as function arguments only if they are bound to a name.
    WIDTHS: tl.constexpr = K.widths
    SIGNS: tl.constexpr = K.signs
    SETS: tl.constexpr = 2 if DUAL and not K.dual else 1
    padded = row_blocks * BLOCK
    row = tl.arange(0, ROWS)  # [row]
    is_second = (row >= ROWS // 2)[None, None, :]  # [1, 1, row]
    if DUAL or PAIRED:
        row = row % (ROWS // 2)
    row_products = 0
    if K.means is not None:
        row_products = row[None, None, :]
        if not FAST:
            row_products = products + row_products
    row += block * BLOCK
    begin = q + sequence.to(tl.int64) * K.columns * padded
    tiles = _query_tiles(begin, row, is_second, padded, K, DUAL, WARPS)  # [warp, column, row] each
    sign_half_sum = 0.0
    if SIGNS is not None:
        tiles = scale_sign_queries(tiles, SIGNS, SETS)
        sign_half_sum = half_sum(tiles, SIGNS, SETS)
    offset = 0.0
    if K.offset:
        offset = tl.load(begin + constexpr_sum(WIDTHS) * padded + row)[None, None, :]
    scale = tl.load(scales + sequence * padded + row)[None, None, :]  # [1, 1, row]
    return Queries(tiles, sign_half_sum, offset, scale, position + (row % q_len)[None, None, :], is_second, row_products, pages, BLOCK)


@triton.jit
def relative_to(queries: tl.tuple, token: tl.tensor) -> tl.tuple:
    """Return ``queries`` with positions relative to ``token``, as int32."""
    position = (queries.position - token).to(tl.int32)
    return Queries(
        queries.tiles, queries.half_sum, queries.offset, queries.scale, position, queries.is_second,
        queries.products, queries.pages, queries.stride,
    )  # fmt: skip


@triton.jit
def with_scale(queries: tl.tuple, scale: tl.tensor) -> tl.tuple:
    """Return ``queries`` with the factor ``scale``, clamped to finite values."""
    return Queries(
        queries.tiles, queries.half_sum, queries.offset, finite_factor(scale), queries.position, queries.is_second,
        queries.products, queries.pages, queries.stride,
    )  # fmt: skip


@triton.jit
def _query_tiles(
    q: tl.tensor,
    row: tl.tensor,
    is_second: tl.tensor,
    stride: tl.tensor,
    K: tl.constexpr,
    DUAL: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tuple:
    """Load a query as tiles ``[warp, column, row]`` in the column order of key tiles.

    For bf16 keys, each tile is loaded twice: the high halves and the low halves of the query. With ``DUAL``, each row belongs to the first
    or the second token of a tile row, and ``is_second`` is a mask of the rows of second tokens. For dual keys, the columns of the other
    token are then 0; otherwise, each token has its own set of tiles.
    """
    WIDTHS: tl.constexpr = K.widths
    tiles = ()
    for index in tl.static_range(2 * len(WIDTHS) if DUAL and not K.dual else len(WIDTHS)):
        if index == len(WIDTHS):
            q -= constexpr_sum(WIDTHS) * stride
        tile = _query_tile(
            q, row, is_second == (index >= len(WIDTHS)), stride,
            WIDTHS[index % len(WIDTHS)], K.dual, K.interleave, DUAL, WARPS,
        )  # fmt: skip
        if K.dtype == "bf16":
            high = tile.to(tl.bfloat16)
            tiles = tiles + (high, (tile - high.to(tl.float32)).to(tl.bfloat16))
        elif K.dtype == "fp16":
            tiles = tiles + (tile.to(tl.float16),)
        else:
            tiles = tiles + (tile,)
        q += WIDTHS[index % len(WIDTHS)] * stride
    return tiles


@triton.jit
def _query_tile(
    q: tl.tensor,
    row: tl.tensor,
    selected: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    DUAL_KEYS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    DUAL: tl.constexpr,
    WARPS: tl.constexpr,
) -> tl.tensor:
    """Load one tile of the query, ``[warp, column, row]``.

    With ``DUAL``, only ``selected`` rows are nonzero. With ``DUAL_KEYS``, ``selected`` rows are nonzero in the first token's columns, and
    all other rows are nonzero in the second token's columns.
    """
    column = tl.arange(0, 2 * WIDTH if DUAL_KEYS else WIDTH)[None, :, None]  # [1, column, 1]
    source_column = column // (2 * INTERLEAVE) * INTERLEAVE + column % INTERLEAVE if DUAL_KEYS else column
    tile = tl.load(q + source_column * stride + row[None, None, :])  # [1, column, row]
    if DUAL_KEYS:
        tile = tl.where((column // INTERLEAVE % 2 == 0) == selected, tile, 0)
    elif DUAL:
        tile = tl.where(selected, tile, 0)
    return tl.broadcast_to(tile, (WARPS, column.shape[1], row.shape[0]))
