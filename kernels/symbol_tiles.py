"""Tiles of symbols of rows of which a thread holds one, for lookups in the layout that the matrix units read.

A symbol of at most 13 bits becomes a binary16: its low 10 bits are the fraction, the others are in the exponent. The product with the
identity is the same number in binary32, and lies where an operand of the next product does. So two bytes of each symbol go through
shared memory, and not its values, of which there are several.
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

FRACTION_BITS = tl.constexpr(10)
EXPONENT_BITS = 3
"""Of a symbol, at most."""

FIRST_BIT = tl.constexpr(13)
"""Of a symbol in its binary32."""

UNIT_OF_CODES = tl.constexpr(128)
"""What ``code_of_symbols`` gives for 1: its bits lie so in the upper half of the binary32."""

ZEROS = tl.constexpr(0x20002000)
"""Two symbols of 0: none is subnormal, and the symbol's bits of the exponent are those of binary32's, too."""


def steps_of(symbols: int) -> list[tuple[int, ...]]:
    """The symbol of each column of each step, -1 for none."""
    return [
        tuple(symbol if symbol < symbols else -1 for symbol in range(first, first + WIDTH.value))
        for first in range(0, symbols, WIDTH.value)
    ]


@triton.jit
def symbol_tile(
    raw: tl.tuple, STEP: tl.constexpr, TWO: tl.constexpr, SYMBOLS: tl.constexpr, C: tl.constexpr, TURNED: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    """The symbols of ``STEP``, int32 ``[warp, token, column]`` from bit ``FIRST_BIT`` up, or turned, ``[warp, column, token]``.

    ``TWO(words, symbol, C, FAST)`` gives a symbol and the next one, 16 bits apart.
    """
    ROW: tl.constexpr = words_of_row(C[0])
    WARPS: tl.constexpr = raw[2 * ROW].shape[0]
    first = _pairs(raw[:ROW], STEP, TWO, SYMBOLS, C, FAST)
    second = _pairs(raw[ROW : 2 * ROW], STEP, TWO, SYMBOLS, C, FAST)
    tile = tile_of_pairs(first, second, WARPS, TURNED, FAST)
    number = tl.arange(0, WIDTH)
    identity = tl.where(number[:, None] == number[None, :], 1.0, 0.0).to(tl.float16)
    identity = tl.broadcast_to(identity[None, :, :], (WARPS, WIDTH, WIDTH))
    if TURNED:
        tile = tl.dot(identity, tile)
    else:
        tile = tl.dot(tile, identity)
    return tile.to(tl.int32, bitcast=True)


@triton.jit
def _pairs(words: tl.tuple, STEP: tl.constexpr, TWO: tl.constexpr, SYMBOLS: tl.constexpr, C: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    pairs = ()
    for symbol in tl.static_range(STEP * WIDTH, (STEP + 1) * WIDTH, 2):
        if symbol < SYMBOLS:
            pairs = pairs + (TWO(words, symbol, C, FAST) | ZEROS,)
        else:
            pairs = pairs + (tl.full(words[0].shape, ZEROS, tl.uint32),)
    return pairs


@triton.constexpr_function
def _mask(bits: int, first: int) -> int:
    return ((1 << bits) - 1) << first


@triton.constexpr_function
def _look_up(first_bit: int, bits: int, offset: int, copies: int) -> str:
    """The index is ``bits`` bits of two words from ``first_bit`` up; of the two entries of 4 halves, pairs of each half."""
    stride = (8 * copies).bit_length() - 1
    mask = ((1 << bits) - 1) << stride
    shift = f"shr.b32 {{0}}, {{1}}, {first_bit - stride};" if first_bit >= stride else f"shl.b32 {{0}}, {{1}}, {stride - first_bit};"
    place = f"{shift} lop3.b32 {{0}}, {{0}}, {mask}, lane, 0xEA; add.u32 {{0}}, {{0}}, base;"
    return f"""{{
        .reg .b32 lane, low, high, base, a0, a1, b0, b1;
        mov.u32 lane, %laneid; and.b32 lane, lane, {copies - 1}; shl.b32 lane, lane, 3; mov.u32 base, kvpack_tables;
        {place.format("low", "$4")} {place.format("high", "$5")}
        ld.shared.v2.b32 {{a0, a1}}, [low + {offset}]; ld.shared.v2.b32 {{b0, b1}}, [high + {offset}];
        prmt.b32 $0, a0, b0, 0x5410; prmt.b32 $1, a0, b0, 0x7632; prmt.b32 $2, a1, b1, 0x5410; prmt.b32 $3, a1, b1, 0x7632;
    }}"""


@triton.jit
def look_up_symbols(symbols: tl.tensor, table: tl.tensor, SHARED: tl.constexpr, FAST: tl.constexpr) -> tl.tuple:
    """4 binary16 tiles: the entry whose index is the fraction of each symbol, which is below the entries.

    ``SHARED`` is the table's (offset in bytes, copies, entries).
    """
    if FAST and SHARED[1] > 0:
        ASSEMBLY: tl.constexpr = _look_up(FIRST_BIT, FRACTION_BITS, SHARED[0], SHARED[1])
        TYPES: tl.constexpr = (tl.float16,) * 4
        found = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,=r,=r,r,r", [symbols], dtype=TYPES, is_pure=True, pack=2)
    else:
        index = (symbols >> FIRST_BIT) & _mask(FRACTION_BITS, 0)
        found = ()
        for value in tl.static_range(4):
            found = found + (tl.load(table + index * 4 + value),)
    return found


@triton.constexpr_function
def _code(mask: int) -> str:
    """Bits of the upper halves of two words become the low end of a binary16's fraction."""
    return f"""{{ .reg .b32 a, b;
        prmt.b32 a, $1, $2, 0x7632; lop3.b32 a, a, {mask * 0x10001}, 0x64006400, 0xEA;
        mov.b32 b, 0x64006400; sub.f16x2 $0, a, b; }}"""


@triton.jit
def code_of_symbols(symbols: tl.tensor, BITS: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """``BITS`` bits of each symbol above the fraction, binary16, that number times ``UNIT_OF_CODES``."""
    MASK: tl.constexpr = _mask(BITS, FIRST_BIT + FRACTION_BITS - 16)
    if FAST:
        value = tl.inline_asm_elementwise(_code(MASK), "=r,r,r", [symbols], dtype=tl.float16, is_pure=True, pack=2)
    else:
        value = ((symbols >> 16) & MASK).to(tl.float16)
    return value
