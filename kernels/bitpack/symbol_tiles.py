"""Tiles of symbols, built from rows in one thread's registers, in the layout of matrix-product results.

That layout is also valid for operands, so symbols can be looked up after the tile is built. Only two bytes per symbol then pass through
shared memory, instead of several decoded values.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from .thread_rows import words_per_token
from .thread_tiles import assemble_tile

WIDTH = tl.constexpr(16)
"""Number of symbols per tile: the inner dimension of one matrix instruction."""

MAX_BITS = tl.constexpr(16)
"""Maximum number of bits per symbol."""


def symbol_steps(symbols: int) -> list[tuple[int, ...]]:
    """Return the symbol index of each column, ``[step][column]``.

    Each step loads one tile of ``WIDTH`` columns (``load_symbol_tile``). Columns after the last symbol have index -1.
    """
    return [
        tuple(symbol if symbol < symbols else -1 for symbol in range(first, first + WIDTH.value))
        for first in range(0, symbols, WIDTH.value)
    ]


@triton.jit
def load_symbol_tile(
    loaded: tl.tuple, STEP: tl.constexpr, SYMBOL_PAIR: tl.constexpr, SYMBOLS: tl.constexpr, CONSTANTS: tl.constexpr, MODE: tl.constexpr
) -> tl.tensor:
    """Return the symbols of step ``STEP`` as one int16 tile: ``[warp, token, column]``, or transposed ``[warp, column, token]``.

    ``SYMBOL_PAIR(words, symbol, CONSTANTS, FAST)`` must return an even-numbered symbol in the low 16 bits, and the next one in the high 16
    bits.
    """
    ROWS: tl.constexpr = CONSTANTS.rows
    ROW: tl.constexpr = words_per_token(ROWS)
    WARPS: tl.constexpr = loaded[2 * ROW].shape[0]
    first = _symbol_pairs(loaded[:ROW], STEP, SYMBOL_PAIR, SYMBOLS, CONSTANTS, MODE.fast)
    second = _symbol_pairs(loaded[ROW : 2 * ROW], STEP, SYMBOL_PAIR, SYMBOLS, CONSTANTS, MODE.fast)
    tile = assemble_tile(first, second, WARPS, MODE)
    if MODE.fast:
        tile = _use_sums_layout(tile, MODE.transposed)
    return tile.to(tl.int16, bitcast=True)


@triton.jit
def _use_sums_layout(tile: tl.tensor, TRANSPOSED: tl.constexpr) -> tl.tensor:
    """Convert ``tile`` to the layout of matrix-product results, which is taken from an unused product."""
    WARPS: tl.constexpr = tile.shape[0]
    square = tl.zeros((WARPS, WIDTH, WIDTH), tl.float16)
    zeros = tl.zeros(tile.shape, tl.float16)
    if TRANSPOSED:
        layout_source = tl.dot(square, zeros, out_dtype=tl.float16)
    else:
        layout_source = tl.dot(zeros, square, out_dtype=tl.float16)
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [tile, layout_source], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _symbol_pairs(
    words: tl.tuple, STEP: tl.constexpr, SYMBOL_PAIR: tl.constexpr, SYMBOLS: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    registers = ()
    for symbol in tl.static_range(STEP * WIDTH, (STEP + 1) * WIDTH, 2):
        if symbol < SYMBOLS:
            registers = registers + (SYMBOL_PAIR(words, symbol, CONSTANTS, FAST),)
        else:
            registers = registers + (tl.zeros(words[0].shape, tl.uint32),)
    return registers
