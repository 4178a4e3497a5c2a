"""Descriptions of lookup tables in shared memory: their offsets and contents."""

from __future__ import annotations

from typing import NamedTuple


class SharedTable(NamedTuple):
    """A lookup table in shared memory at byte ``offset``, with ``entries`` entries, each repeated ``copies`` times.

    If ``copies`` is 0, the table is only in global memory.
    """

    offset: int = 0
    copies: int = 0
    entries: int = 0


class TableContents(NamedTuple):
    """Contents of a table: the number of entries, and the float16 values per entry (``width``). ``side`` is 0 for keys and 1 for values."""

    side: int
    offset: int
    entries: int
    width: int
    copies: int


class SharedTables(NamedTuple):
    """All tables that a program declares and fills, in ``nbytes`` bytes of shared memory."""

    nbytes: int
    fills: tuple[TableContents, ...]
