"""Tiles of rows that one thread holds: the f16x2 registers of a token's decoded symbols, in neighboring columns.

The registers of all tokens are joined to a tile, which the compiler moves to the matrix units through shared memory.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from triton import language as tl

from .f16x2 import joined
from .thread_rows import load_rows, load_unseen, words_of_row
from .token_factors import read_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

F16X2_PER_TILE = tl.constexpr(16)
"""Registers of one token in one tile, two columns each."""

TOKENS = 64
"""Tokens of a warp's tile: two per thread, so that the compiler stores columns, not tokens, side by side."""

SymbolValue = tuple[int, int]
"""One value that a row decodes to: the number of its symbol, and its number among the values of that symbol."""


def f16x2_of_symbols(symbols: int, values: int, dim: int) -> list[tuple[SymbolValue, SymbolValue]]:
    """Pair the values that are channels, two per register: two of one symbol, or the odd ones of two neighboring symbols."""
    registers: list[tuple[SymbolValue, SymbolValue]] = []
    single: SymbolValue | None = None
    for symbol in range(symbols):
        held = [(symbol, value) for value in range(values) if symbol * values + value < dim]
        registers += zip(held[::2], held[1::2], strict=False)
        if len(held) % 2:
            if single is None:
                single = held[-1]
            else:
                registers.append((single, held[-1]))
                single = None
    return registers if single is None else [*registers, (single, single)]


def tiles_of(registers: Sequence[tuple[SymbolValue, SymbolValue]], values: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the registers of whole tiles, four integers each (two ``SymbolValue``), and the channel of each column of each tile.

    The first register is repeated to fill the last tile; the columns of a repeated value have channel -1.
    """
    filled = [*registers, *[registers[0]] * (-len(registers) % F16X2_PER_TILE.value)]
    result: set[SymbolValue] = set()
    channels = []
    for half in (half for register in filled for half in register):
        channels.append(-1 if half in result else half[0] * values + half[1])
        result.add(half)
    width = 2 * F16X2_PER_TILE.value
    return (
        tuple(number for low, high in filled for number in (*low, *high)),
        tuple(tuple(channels[first : first + width]) for first in range(0, len(channels), width)),
    )


@triton.constexpr_function
def _halvings(count: int) -> int:
    return count.bit_length() - 1


@triton.jit
def _joined_by_halves(values: tl.tuple) -> tl.tuple:
    """Join value k with value k + n / 2 of n values along a new last axis."""
    joins = ()
    HALF: tl.constexpr = len(values) // 2
    for number in tl.static_range(HALF):
        joins = joins + (tl.join(values[number], values[number + HALF]),)
    return joins


@triton.jit
def tile_of_f16x2(first: tl.tuple, second: tl.tuple, WARPS: tl.constexpr, TRANSPOSED: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the binary16 tile ``[warp, token, column]``, or transposed ``[warp, column, token]``, of registers of a warp's tokens.

    ``first`` and ``second`` hold the first and the second half of every warp's tokens, uint32 ``[warp * token / 2]`` each.
    """
    WIDTH: tl.constexpr = 2 * len(first)
    columns = ()
    for number in tl.static_range(len(first)):
        columns = columns + (tl.join(first[number], second[number]),)
    columns = _joined_by_halves(columns)
    for _ in tl.static_range(_halvings(len(columns))):
        columns = _joined_by_halves(columns)
    tile = tl.join(columns[0], columns[0])
    HALF: tl.constexpr = tile.shape[0] // WARPS
    tile = tl.trans(tl.reshape(tile, (WARPS, HALF, 2, WIDTH)), 0, 2, 1, 3)
    tile = tl.reshape(tile, (WARPS, 2 * HALF, WIDTH))
    if FAST:
        # Two neighboring columns both hold one register, and become its halves. This also stops the compiler, which otherwise takes the
        # joined values for narrower ones and reads them from shared memory one by one.
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [tile], dtype=tl.float16, is_pure=False, pack=2)
    else:
        upper = tl.arange(0, WIDTH)[None, None, :] % 2 == 1
        tile = tl.where(upper, tile >> 16, tile).to(tl.uint16).to(tl.float16, bitcast=True)
    if TRANSPOSED:
        tile = tl.trans(tile, 0, 2, 1)
    return tile


@triton.jit
def load_rows_and_factor(
    pointers: tl.tuple,
    first: tl.tensor,
    token: tl.tensor,
    valid: tl.tensor,
    CONSTANTS: tl.constexpr,
    MASKED: tl.constexpr,
    WHOLE: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Load the rows of all code streams (``thread_rows.load_rows``), then one factor per token, int32 ``[warp, token]``.

    ``CONSTANTS`` must have ``rows`` and ``factor_bits``.
    """
    ROWS: tl.constexpr = CONSTANTS.rows
    loaded = load_rows(pointers, first, token, valid, ROWS, MASKED, FAST)
    return loaded + (load_unseen(pointers[len(ROWS)], first, token, valid, CONSTANTS.factor_bits, MASKED, FAST),)


@triton.jit
def factor_beside_rows(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the factor that ``load_rows_and_factor`` loaded, float32 ``[warp, token]``."""
    ROWS: tl.constexpr = CONSTANTS.rows
    value = loaded[2 * words_of_row(ROWS)]
    if CONSTANTS.factor_bits == 16:
        value = value.to(tl.int16)
    return read_factor((value,), 0, CONSTANTS.factor_bits, False)


@triton.jit
def decode_rows(
    loaded: tl.tuple,
    table: tl.tensor,
    REGISTERS: tl.constexpr,
    STEP: tl.constexpr,
    SYMBOL: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHARED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Return the tile of ``STEP``; ``SYMBOL(words, table, symbol, CONSTANTS, SHARED, FAST)`` returns the registers of one symbol."""
    ROWS: tl.constexpr = CONSTANTS.rows
    ROW: tl.constexpr = words_of_row(ROWS)
    WARPS: tl.constexpr = loaded[2 * ROW].shape[0]
    first = _registers(loaded[:ROW], table, REGISTERS, STEP, SYMBOL, CONSTANTS, SHARED, FAST)
    second = _registers(loaded[ROW : 2 * ROW], table, REGISTERS, STEP, SYMBOL, CONSTANTS, SHARED, FAST)
    return tile_of_f16x2(first, second, WARPS, TRANSPOSED, FAST)


@triton.jit
def _registers(
    words: tl.tuple,
    table: tl.tensor,
    REGISTERS: tl.constexpr,
    STEP: tl.constexpr,
    SYMBOL: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    registers = ()
    for at in tl.static_range(4 * STEP * F16X2_PER_TILE, 4 * (STEP + 1) * F16X2_PER_TILE, 4):
        registers = registers + (
            _register(
                words, table, REGISTERS[at], REGISTERS[at + 1], REGISTERS[at + 2], REGISTERS[at + 3], SYMBOL, CONSTANTS, SHARED, FAST
            ),
        )
    return registers


@triton.jit
def _register(
    words: tl.tuple,
    table: tl.tensor,
    FIRST: tl.constexpr,
    LOW: tl.constexpr,
    SECOND: tl.constexpr,
    HIGH: tl.constexpr,
    SYMBOL: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Join value ``LOW`` of symbol ``FIRST`` and value ``HIGH`` of symbol ``SECOND``."""
    low = SYMBOL(words, table, FIRST, CONSTANTS, SHARED, FAST)
    if FIRST == SECOND and LOW < HIGH:
        register = low[LOW // 2]
    else:
        high = SYMBOL(words, table, SECOND, CONSTANTS, SHARED, FAST)
        register = joined(low[LOW // 2], high[HIGH // 2], LOW % 2, HIGH % 2, FAST)
    return register
