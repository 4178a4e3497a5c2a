"""A program that fills a table in shared memory and looks words up in it."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.shared_table import declare, fetch, fill, look_up


@triton.jit
def found_of_words(
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
    """``out`` binary16 ``[VALUES, COUNT]``: the entries of ``words``, int16 ``[COUNT]``."""
    if FAST:
        declare(SIZE, WARPS)
        fill(fetch(table, ENTRIES, VALUES), OFFSET, ENTRIES, VALUES, COPIES)
        tl.debug_barrier()
    number = tl.arange(0, COUNT)
    found = look_up(tl.load(words + number), table, POSITION, BITS, VALUES, OFFSET, COPIES, ENTRIES, FAST)
    for value in tl.static_range(VALUES):
        tl.store(out + value * COUNT + number, found[value])
