"""Tables in shared memory: their offsets and their contents."""

from __future__ import annotations

from typing import NamedTuple


class SharedTable(NamedTuple):
    """A table in shared memory: ``copies`` of each of its ``entries``, from byte ``offset`` on; with no copies it is in global memory."""

    offset: int = 0
    copies: int = 0
    entries: int = 0


class Fill(NamedTuple):
    """The contents of a shared table: ``entries`` of ``values`` binary16 from the table of a side, 0 for keys and 1 for values."""

    side: int
    offset: int
    entries: int
    values: int
    copies: int


class SharedTables(NamedTuple):
    """The tables that a program declares in ``nbytes`` of shared memory, and fills."""

    nbytes: int
    fills: tuple[Fill, ...]
