"""Tiles of rows of which a thread holds one: the pairs that a token's symbols decode to, in columns side by side.

The pairs of all tokens are put together, and the compiler carries that tile to the matrix units through shared memory.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from triton import language as tl

from .halves import read_factor
from .pairs import joined
from .rows import load_rows, load_unseen, words_of_row

if TYPE_CHECKING:
    from collections.abc import Sequence

PAIRS_OF_A_TILE = tl.constexpr(16)
"""Two columns each."""

TOKENS = 64
"""Tokens of a warp's tile: two a thread, so that the compiler stores columns side by side, and not tokens."""

Half = tuple[int, int]
"""One binary16 of what a row decodes to: the number of a symbol, and that of a value of it."""


def pairs_of(symbols: int, values: int, dim: int) -> list[tuple[Half, Half]]:
    """All values that are channels, two by two: those of a symbol that lie in one word, and what is left over of neighbouring symbols."""
    pairs: list[tuple[Half, Half]] = []
    single: Half | None = None
    for symbol in range(symbols):
        held = [(symbol, value) for value in range(values) if symbol * values + value < dim]
        pairs += zip(held[::2], held[1::2], strict=False)
        if len(held) % 2:
            if single is None:
                single = held[-1]
            else:
                pairs.append((single, held[-1]))
                single = None
    return pairs if single is None else [*pairs, (single, single)]


def tiles_of(pairs: Sequence[tuple[Half, Half]], values: int) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The pairs of whole tiles, four integers each, the first one repeated to fill up the last; and the channel of each tile's columns.

    A half that occurs again is no channel there.
    """
    filled = [*pairs, *[pairs[0]] * (-len(pairs) % PAIRS_OF_A_TILE.value)]
    found: set[Half] = set()
    channels = []
    for half in (half for pair in filled for half in pair):
        channels.append(-1 if half in found else half[0] * values + half[1])
        found.add(half)
    width = 2 * PAIRS_OF_A_TILE.value
    return (
        tuple(number for low, high in filled for number in (*low, *high)),
        tuple(tuple(channels[first : first + width]) for first in range(0, len(channels), width)),
    )


@triton.constexpr_function
def _halvings(count: int) -> int:
    return count.bit_length() - 1


@triton.jit
def _joined_by_halves(values: tl.tuple) -> tl.tuple:
    """Value k with value k + half of them, a last axis telling which."""
    joins = ()
    HALF: tl.constexpr = len(values) // 2
    for number in tl.static_range(HALF):
        joins = joins + (tl.join(values[number], values[number + HALF]),)
    return joins


@triton.jit
def tile_of_pairs(first: tl.tuple, second: tl.tuple, WARPS: tl.constexpr, TURNED: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The tile of the pairs of both halves of the tokens: ``[warp, token, column]``, or turned, ``[warp, column, token]``."""
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
        # Two columns of one pair hold it both, and become its halves. This is also a wall: without it the compiler takes what is
        # joined for narrower values, and reads them from shared memory one by one.
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [tile], dtype=tl.float16, is_pure=False, pack=2)
    else:
        upper = tl.arange(0, WIDTH)[None, None, :] % 2 == 1
        tile = tl.where(upper, tile >> 16, tile).to(tl.uint16).to(tl.float16, bitcast=True)
    if TURNED:
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
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """The rows of all code streams, then a factor a token; ``CONSTANTS`` have ``rows`` and ``factor_bits``."""
    ROWS: tl.constexpr = CONSTANTS.rows
    raw = load_rows(pointers, first, token, valid, ROWS, MASKED, FAST)
    return raw + (load_unseen(pointers[len(ROWS)], first, token, valid, CONSTANTS.factor_bits, MASKED, FAST),)


@triton.jit
def factor_beside_rows(raw: tl.tuple, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """The factor that ``load_rows_and_factor`` loaded."""
    ROWS: tl.constexpr = CONSTANTS.rows
    value = raw[2 * words_of_row(ROWS)]
    if CONSTANTS.factor_bits == 16:
        value = value.to(tl.int16)
    return read_factor((value,), 0, CONSTANTS.factor_bits, False)


@triton.jit
def decode_rows(
    raw: tl.tuple,
    table: tl.tensor,
    PAIRS: tl.constexpr,
    STEP: tl.constexpr,
    SYMBOL: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHARED: tl.constexpr,
    TURNED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """The tile of ``STEP``; ``SYMBOL(words, table, symbol, CONSTANTS, SHARED, FAST)`` gives the pairs of values of one symbol."""
    ROWS: tl.constexpr = CONSTANTS.rows
    ROW: tl.constexpr = words_of_row(ROWS)
    WARPS: tl.constexpr = raw[2 * ROW].shape[0]
    first = _pairs(raw[:ROW], table, PAIRS, STEP, SYMBOL, CONSTANTS, SHARED, FAST)
    second = _pairs(raw[ROW : 2 * ROW], table, PAIRS, STEP, SYMBOL, CONSTANTS, SHARED, FAST)
    return tile_of_pairs(first, second, WARPS, TURNED, FAST)


@triton.jit
def _pairs(
    words: tl.tuple,
    table: tl.tensor,
    PAIRS: tl.constexpr,
    STEP: tl.constexpr,
    SYMBOL: tl.constexpr,
    CONSTANTS: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    pairs = ()
    for at in tl.static_range(4 * STEP * PAIRS_OF_A_TILE, 4 * (STEP + 1) * PAIRS_OF_A_TILE, 4):
        pairs = pairs + (_pair(words, table, PAIRS[at], PAIRS[at + 1], PAIRS[at + 2], PAIRS[at + 3], SYMBOL, CONSTANTS, SHARED, FAST),)
    return pairs


@triton.jit
def _pair(
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
    """Value ``LOW`` of symbol ``FIRST`` and value ``HIGH`` of symbol ``SECOND``."""
    low = SYMBOL(words, table, FIRST, CONSTANTS, SHARED, FAST)
    if FIRST == SECOND and LOW < HIGH:
        pair = low[LOW // 2]
    else:
        high = SYMBOL(words, table, SECOND, CONSTANTS, SHARED, FAST)
        pair = joined(low[LOW // 2], high[HIGH // 2], LOW % 2, HIGH % 2, FAST)
    return pair
