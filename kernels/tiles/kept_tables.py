"""Tables that a kernel keeps in shared memory: fetched first, and stored there once they have arrived."""

# Triton compiles no unpacking of tensors.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import constant_at
from kvpack.kernels.tables.shared_table import declare, fetch, fill


@triton.jit
def begin_tables(k_table: tl.tensor, v_table: tl.tensor, TABLES: tl.constexpr, WARPS: tl.constexpr) -> tl.tuple:
    """Declare the shared memory of ``TABLES`` and start fetching their entries into registers."""
    FILLS: tl.constexpr = TABLES.fills
    entries = ()
    if TABLES.nbytes:
        declare(TABLES.nbytes, WARPS)
        for number in tl.static_range(len(FILLS)):
            entries = entries + (_fetched(k_table, v_table, constant_at(FILLS, number)),)
    return entries


@triton.jit
def _fetched(k_table: tl.tensor, v_table: tl.tensor, FILL: tl.constexpr) -> tl.tensor:
    return fetch(k_table if FILL.side == 0 else v_table, FILL.entries, FILL.values)


@triton.jit
def fill_tables(entries: tl.tuple, TABLES: tl.constexpr) -> None:
    """Store the entries fetched by ``begin_tables`` in shared memory; ``tl.debug_barrier`` waits for it."""
    FILLS: tl.constexpr = TABLES.fills
    for number in tl.static_range(len(FILLS)):
        _fill(entries[number], constant_at(FILLS, number))


@triton.jit
def _fill(entries: tl.tensor, FILL: tl.constexpr) -> None:
    fill(entries, FILL.offset, FILL.entries, FILL.values, FILL.copies)
