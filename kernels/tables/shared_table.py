"""Tables in shared memory, looked up inside a tile by inline PTX (``table_assembly``), because Triton has no such operation.

A table is copied once per program into memory that the assembly declares, each entry once per bank group, so that no two lanes of a warp
wait for each other. A lookup is then a shift, a mask and a load, in the layout that the matrix units read. Where the assembly is off
(``FAST`` false: Triton's interpreter, or KVPACK_INLINE_ASSEMBLY=0) the same function reads the table from global memory. An index is masked
to the table's width and clamped to its entries before use, so that no code can read outside.
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
from .table_assembly import BANK_BYTES, LARGEST_BYTES, declaration, filling, lookup_of_tiles, registers


def copies_of(entries: int, entry_bytes: int, budget: int) -> int:
    """Return the copies of each entry: one per bank group, or the largest power of two that ``budget`` bytes allow; 0 if none fits."""
    copies = BANK_BYTES // entry_bytes
    while copies and entries * entry_bytes * copies > budget:
        copies //= 2
    return copies


def allow(kernel: Any, table_bytes: int) -> None:
    """Let the driver launch a ``kernel`` that declares tables or patches, which add to its own shared memory.

    Triton requests more than 48 KiB from the driver only if its own part exceeds that, and does not know about tables.
    """
    size = triton_internals.shared_bytes(kernel)
    if table_bytes > LARGEST_BYTES:
        size = triton_internals.COMPILERS_BYTES + table_bytes
        triton_internals.enlarge_shared_memory(kernel, size)
    triton_internals.allow_shared_memory(kernel, size)


@triton.jit
def declare(SIZE: tl.constexpr, WARPS: tl.constexpr) -> None:
    """Reserve ``SIZE`` bytes of shared memory for tables, or locate the launch's (``allow``); once per kernel, before ``fill``."""
    thread = tl.arange(0, 32 * WARPS)
    tl.inline_asm_elementwise(declaration(SIZE), "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def fetch(table: tl.tensor, ENTRIES: tl.constexpr, VALUES: tl.constexpr) -> tl.tensor:
    """Load the entries of a table in global memory, ``VALUES`` (2 or 4) binary16 each as one integer, for ``fill``."""
    number = tl.arange(0, triton.next_power_of_2(ENTRIES))
    if VALUES == 2:
        entries = tl.load(table.to(tl.pointer_type(tl.int32)) + number, number < ENTRIES, 0)
    else:
        entries = tl.load(table.to(tl.pointer_type(tl.int64)) + number, number < ENTRIES, 0)
    return entries


@triton.jit
def fill(entries: tl.tensor, OFFSET: tl.constexpr, ENTRIES: tl.constexpr, VALUES: tl.constexpr, COPIES: tl.constexpr) -> None:
    """Store the entries that ``fetch`` returned from byte ``OFFSET`` on, each ``COPIES`` times.

    ``tl.debug_barrier`` waits for the whole program.
    """
    number = tl.arange(0, entries.shape[0])
    tl.inline_asm_elementwise(
        filling(OFFSET, ENTRIES, VALUES // 2, COPIES),
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
    """Return ``VALUES`` (2 or 4) binary16 tiles: the entry whose index is ``BITS`` bits of each int16 ``word`` from ``POSITION`` up.

    ``table`` is binary16 ``[2^BITS, VALUES]`` in global memory. With ``FAST`` and nonzero ``COPIES``, copies of its first ``ENTRIES`` are
    at ``OFFSET``.
    """
    if FAST and COPIES > 0:
        types: tl.constexpr = (tl.float16,) * VALUES
        result = tl.inline_asm_elementwise(
            lookup_of_tiles(POSITION, BITS, VALUES, OFFSET, COPIES, ENTRIES),
            registers(VALUES, 1),
            [word],
            dtype=types,
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
def in_halves(shared: SharedTable, first: int, values: int) -> SharedTable:
    """Return a table whose lookups read half an entry: it has twice as many copies, from entry ``first`` of ``values`` binary16 on."""
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
    """Run ``look_up`` for ``BITS`` bits of each column from ``BIT`` up, in the part of the table that begins at entry ``FIRST``.

    ``SHARED`` is the table's ``SharedTable``.
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
    """Run ``look_up_bits`` for entries of 4 equal values, one tile: half an entry is loaded, of which there are twice as many copies."""
    if FAST and SHARED.copies > 0:
        HALVES: tl.constexpr = in_halves(SHARED, FIRST, 4)
        found = look_up_bits(planes, table, BIT, BITS, 2, 0, HALVES, FAST)
    else:
        found = look_up_bits(planes, table, BIT, BITS, 4, FIRST, SHARED, FAST)
    return found[0]
