"""Query rows as the matrix units take them, beside tiles of keys."""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl


@triton.constexpr_function
def sum_of(numbers: tuple[int, ...]) -> int:
    """Their sum, when the kernel is compiled."""
    return sum(numbers)


@triton.jit
def query_tiles(
    q: tl.tensor,
    row: tl.tensor,
    second: tl.tensor,
    stride: tl.tensor,
    WIDTHS: tl.constexpr,
    KIND: tl.constexpr,
    WARPS: tl.constexpr,
    PAIRED: tl.constexpr,
    RUN: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tuple:
    """The query in the key tiles' column order, ``[warp, column, row]`` a tile; of ``KIND`` bf16 a high and a low half.

    With ``PAIRS``, rows that are not ``second`` are for the first of two tokens: of a tile's columns if it is ``PAIRED``, else those
    of a first set of tiles. ``RUN`` is ``Tiles.run``.
    """
    tiles = ()
    for number in tl.static_range(2 * len(WIDTHS) if PAIRS and not PAIRED else len(WIDTHS)):
        if number == len(WIDTHS):
            q -= sum_of(WIDTHS) * stride
        tile = _query_tile(q, row, second == (number >= len(WIDTHS)), stride, WIDTHS[number % len(WIDTHS)], WARPS, PAIRED, RUN, PAIRS)
        if KIND == "bf16":
            high = tile.to(tl.bfloat16)
            tiles = tiles + (high, (tile - high.to(tl.float32)).to(tl.bfloat16))
        elif KIND == "fp16":
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
    WARPS: tl.constexpr,
    PAIRED: tl.constexpr,
    RUN: tl.constexpr,
    PAIRS: tl.constexpr,
) -> tl.tensor:
    """One tile; with ``PAIRS``, zeros but in the rows that are ``own``, if ``PAIRED`` in the first tokens' columns, else in the others."""
    column = tl.arange(0, 2 * WIDTH if PAIRED else WIDTH)[None, :, None]
    number = column // (2 * RUN) * RUN + column % RUN if PAIRED else column
    tile = tl.load(q + number * stride + row[None, None, :])
    if PAIRED:
        tile = tl.where((column // RUN % 2 == 0) == own, tile, 0)
    elif PAIRS:
        tile = tl.where(own, tile, 0)
    return tl.broadcast_to(tile, (WARPS, column.shape[1], row.shape[0]))
