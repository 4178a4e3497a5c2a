"""Tiles of symbols from rows that are in one thread, for lookups in the layout of the matrix units' sums.

That is also a layout of their next operand. So two bytes of each symbol go through shared memory instead of its several values.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from .thread_rows import words_of_row
from .thread_tiles import tile_of_f16x2

WIDTH = tl.constexpr(16)
"""Symbols of a tile: the step of the matrix units."""

MAX_BITS = tl.constexpr(16)
"""Bits of a symbol, at most."""


def steps_of(symbols: int) -> list[tuple[int, ...]]:
    """Return the symbol of each column of each step, -1 for none."""
    return [
        tuple(symbol if symbol < symbols else -1 for symbol in range(first, first + WIDTH.value))
        for first in range(0, symbols, WIDTH.value)
    ]


@triton.jit
def symbol_tile(
    loaded: tl.tuple,
    STEP: tl.constexpr,
    TWO: tl.constexpr,
    SYMBOLS: tl.constexpr,
    CONSTANTS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return the symbols of ``STEP``, int16 ``[warp, token, column]``, or transposed, ``[warp, column, token]``.

    ``TWO(words, symbol, CONSTANTS, FAST)`` returns a symbol and the next one, 16 bits apart.
    """
    ROWS: tl.constexpr = CONSTANTS.rows
    ROW: tl.constexpr = words_of_row(ROWS)
    WARPS: tl.constexpr = loaded[2 * ROW].shape[0]
    first = _two_symbols_each(loaded[:ROW], STEP, TWO, SYMBOLS, CONSTANTS, FAST)
    second = _two_symbols_each(loaded[ROW : 2 * ROW], STEP, TWO, SYMBOLS, CONSTANTS, FAST)
    tile = tile_of_f16x2(first, second, WARPS, TRANSPOSED, FAST)
    if FAST:
        tile = _laid_out_as_sums(tile, TRANSPOSED)
    return tile.to(tl.int16, bitcast=True)


@triton.jit
def _laid_out_as_sums(tile: tl.tensor, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Make the compiler lay out ``tile`` as an operand of a product whose result is not needed, and return it."""
    WARPS: tl.constexpr = tile.shape[0]
    square = tl.zeros((WARPS, WIDTH, WIDTH), tl.float16)
    zeros = tl.zeros(tile.shape, tl.float16)
    if TRANSPOSED:
        like = tl.dot(square, zeros, out_dtype=tl.float16)
    else:
        like = tl.dot(zeros, square, out_dtype=tl.float16)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [tile, like], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _two_symbols_each(
    words: tl.tuple, STEP: tl.constexpr, TWO: tl.constexpr, SYMBOLS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    registers = ()
    for symbol in tl.static_range(STEP * WIDTH, (STEP + 1) * WIDTH, 2):
        if symbol < SYMBOLS:
            registers = registers + (TWO(words, symbol, CONSTANTS, FAST),)
        else:
            registers = registers + (tl.zeros(words[0].shape, tl.uint32),)
    return registers
