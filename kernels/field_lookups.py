"""Entries of a table whose index is bits of a packed row, for rows of which a thread holds one: a shift, a mask and a load each.

An entry of the table is two pairs of binary16. It holds one pair twice, or the pairs of two neighbouring fields of a column, which
one index has both of. The thread's own copy and the mask are one operation, which the compiler does not see in ``look_up_words``.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from .pairs import look_up_words, unit
from .row_digits import bits_of_column, pieces_of_bits

VALUES = tl.constexpr(4)
"""Of an entry."""


@triton.constexpr_function
def _load_field(pieces: tuple[tuple[int, int, int, int], ...], words: int, place: int, stride: int) -> str:
    """The first ``words`` pairs of an entry, ``stride`` bytes from the next one; the inputs are the words that have the pieces."""
    own = 2 + words // 2
    copies = stride >> own
    text = f"mov.u32 place, %laneid; and.b32 place, place, {copies - 1}; shl.b32 place, place, {own};"
    for number, piece in enumerate(pieces):
        _, at, count, before = piece
        target = stride.bit_length() - 1 + before
        move = f"shr.b32 part, ${words + number}, {at - target}" if at >= target else f"shl.b32 part, ${words + number}, {target - at}"
        text += f"{move}; lop3.b32 place, part, {((1 << count) - 1) << target}, place, 0xEA;"
    load = "ld.shared.b32 $0," if words == 1 else "ld.shared.v2.b32 {$0, $1},"
    return f"""{{
        .reg .b32 part, place, base;
        {text} mov.u32 base, kvpack_tables; add.u32 place, place, base; {load} [place + {place}];
    }}"""


@triton.constexpr_function
def _registers(outputs: int, inputs: int) -> str:
    return ",".join(["=r"] * outputs + ["r"] * inputs)


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
    """The first ``WORDS`` (1 or 2) pairs of an entry, ``BITS`` bits of a column from ``POSITION`` up after entry ``FIRST``.

    Of entries of which one pair is asked for, all are the same pair twice. ``SHARED`` is the table's (offset in bytes, copies, entries).
    """
    UNIT: tl.constexpr = unit(VALUES, SHARED, FAST)
    PIECES: tl.constexpr = pieces_of_bits(PACKING, COLUMN, POSITION, BITS)
    if FAST and SHARED[1] > 0 and len(PIECES) <= 2:
        ASSEMBLY: tl.constexpr = _load_field(PIECES, WORDS, SHARED[0] + FIRST * UNIT, UNIT)
        inputs = [words[PIECES[0][0]]] if len(PIECES) == 1 else [words[PIECES[0][0]], words[PIECES[1][0]]]
        REGISTERS: tl.constexpr = _registers(WORDS, len(PIECES))
        if WORDS == 1:
            found = (tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, inputs, dtype=tl.uint32, is_pure=True, pack=1),)
        else:
            found = tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, inputs, dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)
    else:
        place = bits_of_column(words, PACKING, COLUMN, POSITION, BITS) * UNIT
        found = look_up_words(place, table, WORDS, VALUES, FIRST, SHARED, FAST)
    return found
