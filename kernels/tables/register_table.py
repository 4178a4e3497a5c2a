"""Tables of at most 8 float16 values in registers, looked up by byte permutations. They need inline PTX.

Larger tables must be in shared memory, where they limit the number of concurrent programs.
"""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import torch
import triton
from triton import language as tl

from kvpack.kernels.bitpack.thread_digits import RowPacking, bit_pieces

MAX_BITS = 3
"""Maximum number of bits of an index, because a permutation selects one of 8 bytes."""


def byte_table(values: torch.Tensor) -> tuple[int, ...]:
    """Arrange up to 8 float16 values for ``select_four``: two integers with the low bytes of all values, then two with the high bytes."""
    words = [int(value) & 0xFFFF for value in values.view(torch.int16)]
    words += [0] * (8 - len(words))
    return tuple(
        int.from_bytes(bytes(word >> shift & 0xFF for word in words[first : first + 4]), "little") for shift in (0, 8) for first in (0, 4)
    )


@triton.constexpr_function
def _digit_positions(packing: RowPacking, symbol: int, first: int, bits: int, distance: int) -> tuple[int, ...]:
    """Return a word, a right shift and a mask for each digit of four neighboring symbols, one after another.

    They move the digits to bits 0, 16, 8 and 24. A digit has ``bits`` bits and begins at bit ``first`` of a field. Neighboring fields are
    ``distance`` bits apart. Digits past the last column are omitted.
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
def _select_f16x2_ptx(table: tuple[int, ...]) -> str:
    """Return PTX that selects the low and the high bytes of four values from ``table``. The outputs are four f16x2 with equal halves."""
    pairs = "".join(f" prmt.b32 ${number}, low, high, {0x4040 + 0x1111 * number};" for number in range(4))
    return f"""{{ .reg .b32 select, low, high;
        shr.b32 select, $4, 12; or.b32 select, select, $4;
        prmt.b32 low, {table[0]}, {table[1]}, select; prmt.b32 high, {table[2]}, {table[3]}, select; {pairs} }}"""


@triton.jit
def select_four(
    words: tl.tuple,
    PACKING: tl.constexpr,
    SYMBOL: tl.constexpr,
    FIRST: tl.constexpr,
    BITS: tl.constexpr,
    DISTANCE: tl.constexpr,
    TABLE: tl.constexpr,
) -> tl.tuple:
    """Look up the values of four symbols, beginning with ``SYMBOL``, in a table in registers. Returns four f16x2 with equal halves.

    ``TABLE`` comes from ``byte_table``. An index has ``BITS`` bits and begins at bit ``FIRST`` of a field. Neighboring fields are
    ``DISTANCE`` bits apart.
    """
    TERMS: tl.constexpr = _digit_positions(PACKING, SYMBOL, FIRST, BITS, DISTANCE)
    digits = tl.zeros_like(words[0])
    for term in tl.static_range(0, len(TERMS), 3):
        if TERMS[term + 1] >= 0:
            digits = digits | ((words[TERMS[term]] >> TERMS[term + 1]) & TERMS[term + 2])
        else:
            digits = digits | ((words[TERMS[term]] << -TERMS[term + 1]) & TERMS[term + 2])
    return tl.inline_asm_elementwise(_select_f16x2_ptx(TABLE), "=r,=r,=r,=r,r", [digits], dtype=(tl.uint32,) * 4, is_pure=True, pack=1)
