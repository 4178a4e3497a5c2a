"""Lookups in a float16 table by entry index, for rows in one thread's registers. An entry has one or two f16x2.

The table is in shared memory, as ``shared_table`` stores it. Without inline PTX, the same functions use plain Triton.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from .shared_table import halve_entries
from .shared_tables import SharedTable
from .table_assembly import entry_lookup_ptx


@triton.constexpr_function
def lookup_unit(values: int, shared: SharedTable, fast: bool) -> int:
    """Return the number of units per entry of ``values`` float16 values, for the positions that ``look_up_words`` receives.

    If the table is in shared memory, a unit is a byte, so that fields are shifted only once. Otherwise, a unit is an entry.
    """
    return 2 * values * shared.copies if fast and shared.copies else 1


@triton.jit
def look_up_words(
    position: tl.tensor,
    table: tl.tensor,
    WORDS: tl.constexpr,
    VALUES: tl.constexpr,
    FIRST: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Return the first ``WORDS`` f16x2 (1 or 2) of the entry that is ``position`` units (``lookup_unit``) after entry ``FIRST``.

    Entries have ``VALUES`` float16 values (2 or 4). ``SHARED`` describes the table (``SharedTable``), which must contain the entry.
    """
    if FAST and SHARED.copies > 0:
        ASSEMBLY: tl.constexpr = entry_lookup_ptx(
            WORDS, SHARED.offset + FIRST * lookup_unit(VALUES, SHARED, FAST), SHARED.copies, 2 * VALUES
        )
        if WORDS == 1:
            result = (tl.inline_asm_elementwise(ASSEMBLY, "=r,r", [position], dtype=tl.uint32, is_pure=True, pack=1),)
        else:
            result = tl.inline_asm_elementwise(ASSEMBLY, "=r,=r,r", [position], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1)
    else:
        pointer = table.to(tl.pointer_type(tl.int32)) + (position + FIRST) * (VALUES // 2)
        result = ()
        for word in tl.static_range(WORDS):
            result = result + (tl.load(pointer + word).to(tl.uint32, bitcast=True),)
    return result


@triton.jit
def look_up_repeated(position: tl.tensor, table: tl.tensor, FIRST: tl.constexpr, SHARED: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """Look up an entry of four equal values. Returns one f16x2.

    Only half of each entry is read. There are twice as many copies of half entries, so fewer lanes conflict.
    """
    if FAST and SHARED.copies > 0:
        HALVES: tl.constexpr = halve_entries(SHARED, 0, 0)
        result = look_up_words(position, table, 1, 2, FIRST, HALVES, FAST)
    else:
        result = look_up_words(position, table, 1, 4, FIRST, SHARED, FAST)
    return result[0]
