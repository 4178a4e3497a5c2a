"""Tables of at most 8 binary16 values in registers: byte permutations select from them, with inline PTX only (``FAST``).

Larger tables are in shared memory, whose size limits the kernels in which a thread holds a row.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import torch
import triton
from triton import language as tl

from kvpack.kernels.bitpack.thread_digits import RowPacking, bit_pieces

MAX_BITS = 3
"""Bits of an index into a table in registers, at most: a permutation selects one of 8 bytes."""


def table_of_bytes(values: torch.Tensor) -> tuple[int, ...]:
    """Arrange at most 8 binary16 values for ``select_of_four``: their low bytes as two integers, then the high ones."""
    words = [int(value) & 0xFFFF for value in values.view(torch.int16)]
    words += [0] * (8 - len(words))
    return tuple(
        int.from_bytes(bytes(word >> shift & 0xFF for word in words[first : first + 4]), "little") for shift in (0, 8) for first in (0, 4)
    )


@triton.constexpr_function
def _gathered(packing: RowPacking, symbol: int, first: int, bits: int, distance: int) -> tuple[int, ...]:
    """Return the positions of the digits of four symbols: three integers (word, right shift, mask) each.

    They move the digits to bits 0, 16, 8 and 24. A digit is ``bits`` bits from ``first`` up in a field of ``distance`` bits; digits beyond
    the columns are left out.
    """
    columns = packing.first_word, packing.column_bytes, packing.width
    masks: dict[tuple[int, int], int] = {}
    for number, target in enumerate((0, 16, 8, 24)):
        position = (symbol + number) // packing.width * distance + first
        if position + bits <= 8 * packing.column_bytes:
            for word, at, count, before in bit_pieces(*columns, (symbol + number) % packing.width, position, bits):
                place = (word, at - target - before)
                masks[place] = masks.get(place, 0) | ((1 << count) - 1) << (target + before)
    return tuple(number for place, mask in masks.items() for number in (*place, mask))


@triton.constexpr_function
def _select_f16x2(table: tuple[int, ...]) -> str:
    """Return PTX that selects the low bytes of four values and their high ones, then joins the four, each twice."""
    pairs = "".join(f" prmt.b32 ${number}, low, high, {0x4040 + 0x1111 * number};" for number in range(4))
    return f"""{{ .reg .b32 select, low, high;
        shr.b32 select, $4, 12; or.b32 select, select, $4;
        prmt.b32 low, {table[0]}, {table[1]}, select; prmt.b32 high, {table[2]}, {table[3]}, select; {pairs} }}"""


@triton.jit
def select_of_four(
    words: tl.tuple,
    PACKING: tl.constexpr,
    SYMBOL: tl.constexpr,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    DISTANCE: tl.constexpr,
    TABLE: tl.constexpr,
) -> tl.tuple:
    """Return the values of four symbols from ``SYMBOL`` on, one f16x2 of equal halves each, from a table in registers.

    ``TABLE`` is the result of ``table_of_bytes``; an index is ``BITS`` bits from ``FIRST`` up in a field of ``DISTANCE`` bits.
    """
    TERMS: tl.constexpr = _gathered(PACKING, SYMBOL, FIRST, BITS, DISTANCE)
    digits = tl.zeros_like(words[0])
    for term in tl.static_range(0, len(TERMS), 3):
        if TERMS[term + 1] >= 0:
            digits = digits | ((words[TERMS[term]] >> TERMS[term + 1]) & TERMS[term + 2])
        else:
            digits = digits | ((words[TERMS[term]] << -TERMS[term + 1]) & TERMS[term + 2])
    types: tl.constexpr = (tl.uint32,) * 4
    return tl.inline_asm_elementwise(_select_f16x2(TABLE), "=r,=r,=r,=r,r", [digits], dtype=types, is_pure=True, pack=1)
