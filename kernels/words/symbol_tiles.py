"""Tiles of symbols of rows of which a thread holds one, for lookups in the layout that the matrix units give their sums in.

That is a layout of their next operand, too. So two bytes of each symbol go through shared memory, and not its values, of which there
are several.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from .row_tiles import tile_of_pairs
from .rows import words_of_row

WIDTH = tl.constexpr(16)
"""Symbols of a tile: the matrix units' step."""

MOST_BITS = tl.constexpr(16)
"""Of a symbol."""


def steps_of(symbols: int) -> list[tuple[int, ...]]:
    """The symbol of each column of each step, -1 for none."""
    return [
        tuple(symbol if symbol < symbols else -1 for symbol in range(first, first + WIDTH.value))
        for first in range(0, symbols, WIDTH.value)
    ]


@triton.jit
def symbol_tile(
    raw: tl.tuple,
    STEP: tl.constexpr,
    TWO: tl.constexpr,
    SYMBOLS: tl.constexpr,
    CONSTANTS: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """The symbols of ``STEP``, int16 ``[warp, token, column]``, or turned, ``[warp, column, token]``.

    ``TWO(words, symbol, CONSTANTS, FAST)`` gives a symbol and the next one, 16 bits apart.
    """
    ROWS: tl.constexpr = CONSTANTS.rows
    ROW: tl.constexpr = words_of_row(ROWS)
    WARPS: tl.constexpr = raw[2 * ROW].shape[0]
    first = _pairs(raw[:ROW], STEP, TWO, SYMBOLS, CONSTANTS, FAST)
    second = _pairs(raw[ROW : 2 * ROW], STEP, TWO, SYMBOLS, CONSTANTS, FAST)
    tile = tile_of_pairs(first, second, WARPS, TURNED, FAST)
    if FAST:
        tile = _laid_out_as_sums(tile, TURNED)
    return tile.to(tl.int16, bitcast=True)


@triton.jit
def _laid_out_as_sums(tile: tl.tensor, TURNED: tl.constexpr) -> tl.tensor:
    """``tile``, which the compiler lays out as the other operand of an operation, a product that nothing needs."""
    WARPS: tl.constexpr = tile.shape[0]
    square = tl.zeros((WARPS, WIDTH, WIDTH), tl.float16)
    zeros = tl.zeros(tile.shape, tl.float16)
    if TURNED:
        like = tl.dot(square, zeros, out_dtype=tl.float16)
    else:
        like = tl.dot(zeros, square, out_dtype=tl.float16)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [tile, like], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _pairs(
    words: tl.tuple, STEP: tl.constexpr, TWO: tl.constexpr, SYMBOLS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    pairs = ()
    for symbol in tl.static_range(STEP * WIDTH, (STEP + 1) * WIDTH, 2):
        if symbol < SYMBOLS:
            pairs = pairs + (TWO(words, symbol, CONSTANTS, FAST),)
        else:
            pairs = pairs + (tl.zeros(words[0].shape, tl.uint32),)
    return pairs
