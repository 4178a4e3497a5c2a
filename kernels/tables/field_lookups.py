"""Table lookups by bits of a packed row, for rows that one thread holds: a shift, a mask and a load each.

A table entry is two f16x2: one of them twice, or those of two neighboring fields of a column, which form one index. Selecting the thread's
own copy and masking are one instruction here, which the compiler does not find in ``look_up_words``.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.bitpack.thread_digits import column_bits, column_pieces

from .table_assembly import lookup_of_field, registers
from .thread_lookups import look_up_words, unit

VALUES = tl.constexpr(4)
"""Binary16 values of an entry."""


@triton.jit
def look_up_field(
    words: tl.tuple,
    table: tl.tensor,
    PACKING: tl.constexpr,
    COLUMN: tl.constexpr,
    POSITION: tl.constexpr,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    FIRST: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Return the first ``WORDS`` (1 or 2) f16x2 of an entry.

    Its number after ``FIRST`` is ``BITS`` bits of a column from ``POSITION`` up. Entries for ``WORDS`` = 1 hold their f16x2 twice.
    ``SHARED`` is the table's ``SharedTable``.
    """
    UNIT: tl.constexpr = unit(VALUES, SHARED, FAST)
    PIECES: tl.constexpr = column_pieces(PACKING, COLUMN, POSITION, BITS)
    if FAST and SHARED.copies > 0 and len(PIECES) <= 2:
        ASSEMBLY: tl.constexpr = lookup_of_field(PIECES, WORDS, SHARED.offset + FIRST * UNIT, UNIT)
        inputs = [words[PIECES[0][0]]] if len(PIECES) == 1 else [words[PIECES[0][0]], words[PIECES[1][0]]]
        REGISTERS: tl.constexpr = registers(WORDS, len(PIECES))
        if WORDS == 1:
            result = (tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, inputs, dtype=tl.uint32, is_pure=True, pack=1),)
        else:
            result = tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, inputs, dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)
    else:
        place = column_bits(words, PACKING, COLUMN, POSITION, BITS) * UNIT
        result = look_up_words(place, table, WORDS, VALUES, FIRST, SHARED, FAST)
    return result
