"""Table lookups by bits of a packed row in one thread's registers. Each takes a shift, a mask and a load.

A table entry is two f16x2: one value twice, or the values of two neighboring fields of a column, which form one index. Unlike in
``look_up_words``, one instruction selects the thread's own copy of the table and masks the index; the compiler does not find this
instruction.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.bitpack.thread_digits import column_bits, column_pieces

from .table_assembly import field_lookup_ptx, register_constraints
from .thread_lookups import look_up_words, lookup_unit

VALUES = tl.constexpr(4)
"""Number of float16 values per entry."""


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
    """Return the first ``WORDS`` f16x2 (1 or 2) of a table entry. Entries for ``WORDS`` = 1 contain the same f16x2 twice.

    The index of the entry, counted from entry ``FIRST``, is ``BITS`` bits of a column, beginning at bit ``POSITION``. ``SHARED`` describes
    the table (``SharedTable``).
    """
    UNIT: tl.constexpr = lookup_unit(VALUES, SHARED, FAST)
    PIECES: tl.constexpr = column_pieces(PACKING, COLUMN, POSITION, BITS)
    if FAST and SHARED.copies > 0 and len(PIECES) <= 2:
        ASSEMBLY: tl.constexpr = field_lookup_ptx(PIECES, WORDS, SHARED.offset + FIRST * UNIT, UNIT)
        inputs = [words[PIECES[0][0]]] if len(PIECES) == 1 else [words[PIECES[0][0]], words[PIECES[1][0]]]
        REGISTERS: tl.constexpr = register_constraints(WORDS, len(PIECES))
        if WORDS == 1:
            result = (tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, inputs, dtype=tl.uint32, is_pure=True, pack=1),)
        else:
            result = tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, inputs, dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)
    else:
        place = column_bits(words, PACKING, COLUMN, POSITION, BITS) * UNIT
        result = look_up_words(place, table, WORDS, VALUES, FIRST, SHARED, FAST)
    return result
