"""The entries of a folder in the order of their last use, from an index whose times are as old as they were when they were noted."""

from __future__ import annotations

import heapq
import os
from typing import TYPE_CHECKING

from .index import key_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from .folder import Folder
    from .index import Index, Row

_PAGE = 256
_FIRST, _LAST = -(2**63), 2**63 - 1


def least_recently_used(index: Index, folder: Folder, latest_ns: int) -> Generator[tuple[bytes, int], None, None]:
    """The keys and sizes of the entries, the least recently used first, and before all those whose last use is after ``latest_ns``.

    Uses only make a time later, so an entry whose file has the time of its row is older than what follows. Later times are noted.
    """
    latest_ns = min(latest_ns, _LAST)
    heap: list[tuple[bool, int, int, tuple[bytes, int]]] = []
    uses: list[tuple[int, int]] = []
    try:
        for number, rest, size, noted in _rows(index, latest_ns):
            place = (noted <= latest_ns, noted, number)
            while heap and heap[0][:3] < place:
                yield heapq.heappop(heap)[3]
            key = key_of(number, rest)
            try:
                used = os.stat(folder.path(key), follow_symlinks=False).st_mtime_ns
            except OSError:
                # It is gone: whoever removes it corrects the row.
                used = noted
            if used == noted:
                yield key, size
                continue
            uses.append((used, number))
            heapq.heappush(heap, (used <= latest_ns, used, number, (key, size)))
        while heap:
            yield heapq.heappop(heap)[3]
    finally:
        if uses:
            index.note_uses(uses)


def _rows(index: Index, latest_ns: int) -> Iterator[Row]:
    for after, before in (((latest_ns, _LAST), _LAST), ((_FIRST, _FIRST), latest_ns)):
        while rows := index.oldest(_PAGE, after, before):
            yield from rows
            after = rows[-1][3], rows[-1][0]
