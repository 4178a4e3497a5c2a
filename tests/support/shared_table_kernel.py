"""A kernel that fills a table in shared memory and looks words up in it."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.tables.shared_table import declare, fetch, fill, look_up
from kvpack.kernels.tables.table_assembly import MAX_STATIC_BYTES

LARGEST = tl.constexpr(MAX_STATIC_BYTES)


@triton.jit
def look_up_words_kernel(
    out: tl.tensor,
    words: tl.tensor,
    table: tl.tensor,
    COUNT: tl.constexpr,
    POSITION: tl.constexpr,
    BITS: tl.constexpr,
    VALUES: tl.constexpr,
    ENTRIES: tl.constexpr,
    OFFSET: tl.constexpr,
    COPIES: tl.constexpr,
    SIZE: tl.constexpr,
    WARPS: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """Write the table entries of ``words``, int16 ``[COUNT]``, to ``out``, binary16 ``[VALUES, COUNT]``.

    For large tables, the low bits of the words' sum follow the entries.

    The sum over several warps uses shared memory that the compiler allocates before large tables.
    """
    if FAST:
        declare(SIZE, WARPS)
        fill(fetch(table, ENTRIES, VALUES), OFFSET, ENTRIES, VALUES, COPIES)
        tl.debug_barrier()
    number = tl.arange(0, COUNT)
    word = tl.load(words + number)
    found = look_up(word, table, POSITION, BITS, VALUES, OFFSET, COPIES, ENTRIES, FAST)
    for value in tl.static_range(VALUES):
        tl.store(out + value * COUNT + number, found[value])
    if SIZE > LARGEST:
        tl.store(out + VALUES * COUNT, (tl.sum(word.to(tl.int32)) & 0xFF).to(tl.float16))
