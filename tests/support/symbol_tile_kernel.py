"""A kernel that creates a tile of symbols in the layout of the matrix units' accumulators."""

# Tuples of tensors change their type while a kernel is compiled, and Triton is untyped.
# mypy: disable-error-code="assignment, untyped-decorator"
# Triton compiles no unpacking.
# ruff: noqa: RUF005

from __future__ import annotations

from typing import NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.bitpack.symbol_tiles import WIDTH, load_symbol_tile
from kvpack.kernels.bitpack.thread_tiles import TOKENS

PAIRS = tl.constexpr(WIDTH.value // 2)
HALF = tl.constexpr(TOKENS // 2)


class Rows(NamedTuple):
    """The constants of a loader that ``load_symbol_tile`` uses."""

    rows: tuple[int, ...]


@triton.jit
def symbol_pair_word(words: tl.tuple, SYMBOL: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Return the word that contains two symbols."""
    return words[SYMBOL // 2]


@triton.jit
def tile_kernel(
    out: tl.tensor,
    words: tl.tensor,
    SYMBOLS: tl.constexpr,
    CONSTANTS: tl.constexpr,
    MODE: tl.constexpr,
    WARPS: tl.constexpr,
) -> None:
    """Write the halves of ``words``, uint32 ``[token, WIDTH / 2]``, to ``out``, int16 ``[token, WIDTH]``. A warp has 64 tokens."""
    row = tl.arange(0, HALF * WARPS)
    row = row // HALF * (2 * HALF) + row % HALF
    raw = ()
    for half in tl.static_range(2):
        for pair in tl.static_range(PAIRS):
            raw = raw + (tl.load(words + (row + half * HALF) * PAIRS + pair).to(tl.uint32, bitcast=True),)
    warp = tl.arange(0, WARPS)[:, None, None]
    raw = raw + (warp,)
    tile = load_symbol_tile(raw, 0, symbol_pair_word, SYMBOLS, CONSTANTS, MODE)
    token, column = tl.arange(0, 2 * HALF), tl.arange(0, WIDTH)
    if MODE.transposed:
        at = (warp * (2 * HALF) + token[None, None, :]) * WIDTH + column[None, :, None]
    else:
        at = (warp * (2 * HALF) + token[None, :, None]) * WIDTH + column[None, None, :]
    tl.store(out + at, tile)
