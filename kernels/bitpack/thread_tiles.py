"""Tiles built from rows in one thread's registers.

Each f16x2 register contains two decoded values of a token, in neighboring columns. The registers of all tokens are joined into a tile,
which the compiler moves to the layout of matrix operands through shared memory.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
from triton import language as tl

from .f16x2 import join_halves
from .thread_rows import load_number, load_rows, words_per_token
from .token_factors import read_factor

F16X2_PER_TILE = tl.constexpr(16)
"""Number of registers per token in one tile, with two columns each."""

TOKENS = 64
"""Number of tokens in a warp's tile: two per thread, so that the compiler stores columns, not tokens, next to each other."""

SymbolValue = tuple[int, int]
"""A value that a row decodes to: the index of its symbol, and its index among the values of that symbol."""


def pair_values(symbols: int, values: int, dim: int) -> list[tuple[SymbolValue, SymbolValue]]:
    """Assign the decoded channels to registers, two channels per register.

    A register contains two values of one symbol, or the leftover values of two neighboring symbols.
    """
    registers: list[tuple[SymbolValue, SymbolValue]] = []
    single: SymbolValue | None = None
    for symbol in range(symbols):
        channels = [(symbol, value) for value in range(values) if symbol * values + value < dim]
        registers += zip(channels[::2], channels[1::2], strict=False)
        if len(channels) % 2:
            if single is None:
                single = channels[-1]
            else:
                registers.append((single, channels[-1]))
                single = None
    return registers if single is None else [*registers, (single, single)]


def assign_tiles(registers: Sequence[tuple[SymbolValue, SymbolValue]], values: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """Return the registers of each tile as four integers each (two ``SymbolValue``), and the channel of each column of every tile.

    The last tile is filled up with copies of the first register. Columns with a repeated value have channel -1.
    """
    filled = [*registers, *[registers[0]] * (-len(registers) % F16X2_PER_TILE.value)]
    seen: set[SymbolValue] = set()
    channels = []
    for half in (half for register in filled for half in register):
        channels.append(-1 if half in seen else half[0] * values + half[1])
        seen.add(half)
    width = 2 * F16X2_PER_TILE.value
    return (
        tuple(integer for low, high in filled for integer in (*low, *high)),
        tuple(tuple(channels[first : first + width]) for first in range(0, len(channels), width)),
    )


@triton.constexpr_function
def _log2(count: int) -> int:
    return count.bit_length() - 1


@triton.jit
def _join_halves(values: tl.tuple) -> tl.tuple:
    """Join each element of the first half of ``values`` with its counterpart in the second half, along a new last axis."""
    joins = ()
    HALF: tl.constexpr = len(values) // 2
    for index in tl.static_range(HALF):
        joins = joins + (tl.join(values[index], values[index + HALF]),)
    return joins


@triton.jit
def assemble_tile(first: tl.tuple, second: tl.tuple, WARPS: tl.constexpr, MODE: tl.constexpr) -> tl.tensor:
    """Assemble f16x2 registers into a float16 tile ``[warp, token, column]``, or transposed ``[warp, column, token]``.

    ``first`` contains the registers for the first half of each warp's tokens, and ``second`` those for the second half. A register is
    uint32 ``[warp * token / 2]``.
    """
    WIDTH: tl.constexpr = 2 * len(first)
    columns = ()
    for index in tl.static_range(len(first)):
        columns = columns + (tl.join(first[index], second[index]),)
    columns = _join_halves(columns)
    for _ in tl.static_range(_log2(len(columns))):
        columns = _join_halves(columns)
    tile = tl.join(columns[0], columns[0])
    HALF: tl.constexpr = tile.shape[0] // WARPS
    tile = tl.trans(tl.reshape(tile, (WARPS, HALF, 2, WIDTH)), 0, 2, 1, 3)
    tile = tl.reshape(tile, (WARPS, 2 * HALF, WIDTH))
    if MODE.fast:
        # Two neighboring columns are copies of one register, and become its halves. This also hides the copies from the compiler, which
        # would otherwise narrow the joined values and read them from shared memory one by one.
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [tile], dtype=tl.float16, is_pure=False, pack=2)
    else:
        upper = tl.arange(0, WIDTH)[None, None, :] % 2 == 1
        tile = tl.where(upper, tile >> 16, tile).to(tl.uint16).to(tl.float16, bitcast=True)
    if MODE.transposed:
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
    MODE: tl.constexpr,
) -> tl.tuple:
    """Load the rows of all code streams (``thread_rows.load_rows``), and then the token factors, int32 ``[warp, token]``.

    ``CONSTANTS`` must have the fields ``rows`` and ``factor_bits``.
    """
    ROWS: tl.constexpr = CONSTANTS.rows
    loaded = load_rows(pointers, first, token, valid, ROWS, MASKED, MODE.fast)
    return loaded + (load_number(pointers[len(ROWS)], first, token, valid, CONSTANTS.factor_bits, MASKED, MODE),)


@triton.jit
def read_row_factor(loaded: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Convert the token factors loaded by ``load_rows_and_factor`` to float32 ``[warp, token]``."""
    ROWS: tl.constexpr = CONSTANTS.rows
    value = loaded[2 * words_per_token(ROWS)]
    return read_factor((value, tl.zeros(value.shape, tl.int32)), 0, CONSTANTS.factor_bits, FAST)


@triton.jit
def decode_rows(
    loaded: tl.tuple,
    table: tl.tensor,
    REGISTERS: tl.constexpr,
    STEP: tl.constexpr,
    SYMBOL: tl.constexpr,
    CONSTANTS: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """Decode the tile of step ``STEP``.

    ``SYMBOL(words, table, symbol, CONSTANTS, MODE)`` must return the f16x2 registers with the values of one symbol.
    """
    ROWS: tl.constexpr = CONSTANTS.rows
    ROW: tl.constexpr = words_per_token(ROWS)
    WARPS: tl.constexpr = loaded[2 * ROW].shape[0]
    first = _decode_registers(loaded[:ROW], table, REGISTERS, STEP, SYMBOL, CONSTANTS, MODE)
    second = _decode_registers(loaded[ROW : 2 * ROW], table, REGISTERS, STEP, SYMBOL, CONSTANTS, MODE)
    return assemble_tile(first, second, WARPS, MODE)


@triton.jit
def _decode_registers(
    words: tl.tuple,
    table: tl.tensor,
    REGISTERS: tl.constexpr,
    STEP: tl.constexpr,
    SYMBOL: tl.constexpr,
    CONSTANTS: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tuple:
    registers = ()
    for index in tl.static_range(4 * STEP * F16X2_PER_TILE, 4 * (STEP + 1) * F16X2_PER_TILE, 4):
        registers = registers + (
            _decode_register(
                words,
                table,
                REGISTERS[index],
                REGISTERS[index + 1],
                REGISTERS[index + 2],
                REGISTERS[index + 3],
                SYMBOL,
                CONSTANTS,
                MODE,
            ),
        )
    return registers


@triton.jit
def _decode_register(
    words: tl.tuple,
    table: tl.tensor,
    FIRST: tl.constexpr,
    LOW: tl.constexpr,
    SECOND: tl.constexpr,
    HIGH: tl.constexpr,
    SYMBOL: tl.constexpr,
    CONSTANTS: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """Return an f16x2: value ``LOW`` of symbol ``FIRST`` in its low half, and value ``HIGH`` of symbol ``SECOND`` in its high half."""
    low = SYMBOL(words, table, FIRST, CONSTANTS, MODE)
    if FIRST == SECOND and LOW < HIGH:
        register = low[LOW // 2]
    else:
        high = SYMBOL(words, table, SECOND, CONSTANTS, MODE)
        register = join_halves(low[LOW // 2], high[HIGH // 2], LOW % 2, HIGH % 2, MODE.fast)
    return register
