"""Lookup tables that a kernel keeps in shared memory. Loading starts early; entries are stored after they have arrived."""

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
    """Declare the shared memory of ``TABLES``, and start loading the tables' entries into registers."""
    FILLS: tl.constexpr = TABLES.fills
    entries = ()
    if TABLES.nbytes:
        declare(TABLES.nbytes, WARPS)
        for number in tl.static_range(len(FILLS)):
            entries = entries + (_fetch_table(k_table, v_table, constant_at(FILLS, number)),)
    return entries


@triton.jit
def _fetch_table(k_table: tl.tensor, v_table: tl.tensor, FILL: tl.constexpr) -> tl.tensor:
    return fetch(k_table if FILL.side == 0 else v_table, FILL.entries, FILL.width)


@triton.jit
def fill_tables(entries: tl.tuple, TABLES: tl.constexpr) -> None:
    """Store the entries that ``begin_tables`` loaded in shared memory. A ``tl.debug_barrier`` must follow."""
    FILLS: tl.constexpr = TABLES.fills
    for number in tl.static_range(len(FILLS)):
        _fill_table(entries[number], constant_at(FILLS, number))


@triton.jit
def _fill_table(entries: tl.tensor, FILL: tl.constexpr) -> None:
    fill(entries, FILL.offset, FILL.entries, FILL.width, FILL.copies)
