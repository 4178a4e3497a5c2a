"""Lookup tables in shared memory, read inside a tile by inline PTX (``table_assembly``), because Triton has no such operation.

A table is copied to shared memory once per program, each entry once per bank group, so that lanes of a warp never conflict. A lookup is
then a shift, a mask and a load, in the layout of matrix operands. If inline PTX is off (in Triton's interpreter, or with
KVPACK_INLINE_ASSEMBLY=0), the same functions read the table from global memory. Indices are masked and clamped, so that no code can read
outside the table.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
from triton import language as tl

from kvpack.kernels import triton_internals
from kvpack.kernels.bitpack.bitfields import extract_straddling

from .shared_tables import SharedTable
from .table_assembly import (
    BANK_BYTES,
    MAX_STATIC_BYTES,
    declare_ptx,
    fill_ptx,
    register_constraints,
    tile_lookup_ptx,
    triplet_lookup_ptx,
    word_lookup_ptx,
)


def choose_copies(entries: int, entry_bytes: int, budget: int) -> int:
    """Return the number of copies of each table entry: one per bank group if they fit in ``budget`` bytes.

    Otherwise, return the largest power of two that fits, or 0 if not even one copy fits.
    """
    copies = BANK_BYTES // entry_bytes
    while copies and entries * entry_bytes * copies > budget:
        copies //= 2
    return copies


def allow_tables(kernel: Any, table_bytes: int) -> None:
    """Let the CUDA driver launch ``kernel``, which declares ``table_bytes`` bytes of tables in addition to the compiler's shared memory.

    Triton does not count tables, so it asks the driver for more than 48 KiB only if the compiler's own part exceeds that.
    """
    size = triton_internals.shared_bytes(kernel)
    if table_bytes > MAX_STATIC_BYTES:
        size = triton_internals.COMPILER_BYTES + table_bytes
        triton_internals.enlarge_shared_memory(kernel, size)
    triton_internals.allow_shared_memory(kernel, size)


@triton.jit
def declare(SIZE: tl.constexpr, WARPS: tl.constexpr) -> None:
    """Reserve ``SIZE`` bytes of shared memory for tables. Call it once per kernel, before ``fill``.

    Tables that exceed the static shared memory are placed in the launch's dynamic shared memory (``allow_tables``).
    """
    thread = tl.arange(0, 32 * WARPS)
    tl.inline_asm_elementwise(declare_ptx(SIZE), "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch(table: tl.tensor, ENTRIES: tl.constexpr, VALUES: tl.constexpr) -> tl.tensor:
    """Load the entries of a table from global memory, for ``fill``. An entry of ``VALUES`` float16 values (2 or 4) is one integer."""
    number = tl.arange(0, triton.next_power_of_2(ENTRIES))
    if VALUES == 2:
        entries = tl.load(table.to(tl.pointer_type(tl.int32)) + number, number < ENTRIES, 0)
    else:
        entries = tl.load(table.to(tl.pointer_type(tl.int64)) + number, number < ENTRIES, 0)
    return entries


@triton.jit
def fill(entries: tl.tensor, OFFSET: tl.constexpr, ENTRIES: tl.constexpr, VALUES: tl.constexpr, COPIES: tl.constexpr) -> None:
    """Store the ``entries`` that ``fetch`` loaded in shared memory, beginning at byte ``OFFSET``, with ``COPIES`` copies of each.

    A ``tl.debug_barrier`` must follow.
    """
    number = tl.arange(0, entries.shape[0])
    tl.inline_asm_elementwise(
        fill_ptx(OFFSET, ENTRIES, VALUES // 2, COPIES),
        "=r,r,r" if VALUES == 2 else "=r,l,r",
        [entries, number],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def look_up(
    word: tl.tensor,
    table: tl.tensor,
    POSITION: tl.constexpr,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    OFFSET: tl.constexpr,
    COPIES: tl.constexpr,
    ENTRIES: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Look up table entries. Returns one float16 tile for each of their ``VALUES`` values (2 or 4).

    The index is ``BITS`` bits of each int16 ``word``, beginning at bit ``POSITION``. ``table`` is float16 ``[2^BITS, VALUES]`` in global
    memory. With inline PTX and nonzero ``COPIES``, its first ``ENTRIES`` entries are read from shared memory instead, where they begin at
    byte ``OFFSET``.
    """
    if FAST and COPIES > 0:
        result = tl.inline_asm_elementwise(
            tile_lookup_ptx(POSITION, BITS, VALUES, OFFSET, COPIES, ENTRIES),
            register_constraints(VALUES, 1),
            [word],
            dtype=(tl.float16,) * VALUES,
            is_pure=True,
            pack=2,
        )
    else:
        index = (word.to(tl.int32) >> POSITION) & ((1 << BITS) - 1)
        result = ()
        for value in tl.static_range(VALUES):
            result = result + (tl.load(table + index * VALUES + value),)
    return result


@triton.constexpr_function
def halve_entries(shared: SharedTable, first: int, values: int) -> SharedTable:
    """Describe the table from entry ``first`` on as a table of half entries, with twice as many copies of each.

    An entry has ``values`` float16 values.
    """
    return SharedTable(shared.offset + first * values * 2 * shared.copies, 2 * shared.copies, shared.entries - first)


@triton.jit
def look_up_bits(
    planes: tl.tuple,
    table: tl.tensor,
    BIT: tl.constexpr,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    FIRST: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Look up table entries by ``BITS`` bits of each column, beginning at bit ``BIT``. Returns the same tiles as ``look_up``.

    The lookup table begins at entry ``FIRST`` of ``table``, which ``SHARED`` describes (``SharedTable``).
    """
    OFFSET: tl.constexpr = SHARED.offset + FIRST * VALUES * 2 * SHARED.copies
    COPIES: tl.constexpr = SHARED.copies
    ENTRIES: tl.constexpr = SHARED.entries - FIRST
    if BIT % 16 + BITS > 16:
        result = look_up(
            extract_straddling(planes, BIT, BITS, FAST), table + FIRST * VALUES, 0, BITS, VALUES, OFFSET, COPIES, ENTRIES, FAST
        )
    else:
        result = look_up(planes[BIT // 16], table + FIRST * VALUES, BIT % 16, BITS, VALUES, OFFSET, COPIES, ENTRIES, FAST)
    return result


@triton.jit
def look_up_repeated(
    planes: tl.tuple,
    table: tl.tensor,
    BIT: tl.constexpr,
    BITS: tl.constexpr,
    FIRST: tl.constexpr,
    SHARED: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Look up entries of 4 equal values as ``look_up_bits`` does. Returns a single tile.

    Only half of each entry is read. There are twice as many copies of half entries, so fewer lanes conflict.
    """
    if FAST and SHARED.copies > 0:
        HALVES: tl.constexpr = halve_entries(SHARED, FIRST, 4)
        result = look_up_bits(planes, table, BIT, BITS, 2, 0, HALVES, FAST)
    else:
        result = look_up_bits(planes, table, BIT, BITS, 4, FIRST, SHARED, FAST)
    return result[0]


@triton.jit
def look_up_pairs(words: tl.tuple, POSITION: tl.constexpr, BITS: tl.constexpr, SHARED: tl.constexpr) -> tl.tuple:
    """Look up two entries of two values per register (``word_lookup_ptx``).

    Returns the lower words' entries, then the upper words' entries. ``words`` contains an int16 tile. For words of 24 bits, it also
    contains a tile with their upper bytes, and the first bit of each word's byte.
    """
    ASSEMBLY: tl.constexpr = word_lookup_ptx(POSITION, BITS, SHARED.offset, SHARED.copies, len(words) == 1)
    REGISTERS: tl.constexpr = register_constraints(2, len(words))
    inputs = [words[0]] if len(words) == 1 else [words[0], words[1], words[2]]
    return tl.inline_asm_elementwise(ASSEMBLY, REGISTERS, inputs, dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def look_up_triplets(words: tl.tuple, SIGN_BYTE: tl.constexpr, SHARED: tl.constexpr) -> tl.tuple:
    """Look up triplets with ``triplet_lookup_ptx``.

    Returns (x, y) of first triplets, (x, y) of second triplets, and z of both, as float16 tiles. ``words`` are the inputs of the PTX, each
    with two equal columns for both values of a register.
    """
    ASSEMBLY: tl.constexpr = triplet_lookup_ptx(SHARED.offset, SHARED.copies, SIGN_BYTE)
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [words[0], words[1], words[2], words[3], words[4], words[5]],
        dtype=(tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
