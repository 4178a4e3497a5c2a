"""When entries of an object store were last used, for stores whose objects have no time that a reader may set.

Every user notes the chains that it uses and now and then puts a record of them beside the entries: keys, the one used longest
ago first, and so every entry before its ancestors. The store's own clock dates a record. Whoever evicts reads all records and
puts one in their place (spec/store.md, Object stores).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from .keys import KEY_BYTES
from .locks import Lock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

INTERVAL_SECONDS = 60.0
"""How long a user notes before it puts a record; a crash loses what was noted since."""
GRACE_NS = 3600 * 10**9
"""An entry that no record names and that is younger than this may be one that its writer has yet to record."""
_MOST_NOTED = 65_536


class Uses:
    """What one user has used since its last record. Safe to use from any thread."""

    def __init__(self) -> None:
        # A dict keeps the order of insertion: what was used last is last.
        self._noted: dict[bytes, None] = {}
        self._since = time.monotonic()
        self._lock = Lock()

    def note(self, chain: Sequence[bytes]) -> None:
        """Note that ``chain``, from its first chunk on, is in use."""
        with self._lock:
            if not self._noted:
                self._since = time.monotonic()
            for key in reversed(chain):
                self._noted.pop(key, None)
                self._noted[key] = None

    def due(self) -> bool:
        """Whether a record should be put."""
        with self._lock:
            waited = time.monotonic() - self._since >= INTERVAL_SECONDS
            return bool(self._noted) and (waited or len(self._noted) >= _MOST_NOTED)

    def take(self) -> bytes:
        """The record of what was noted, which is forgotten; empty when nothing was."""
        with self._lock:
            noted, self._noted = self._noted, {}
        return b"".join(noted)


def record_name() -> str:
    """A new name for a record: of two that have one time, a user's later one comes later in the alphabet."""
    return f"{time.time_ns():020d}-{os.urandom(8).hex()}"


def order_of(records: Iterable[tuple[int, str, bytes]]) -> dict[bytes, int]:
    """The keys of all records, the one used longest ago first, with the time of their last use.

    ``records`` are (time, name, record); one whose length makes no sense counts as far as it does.
    """
    last: dict[bytes, int] = {}
    for used_ns, _, record in sorted(records):
        for at in range(0, len(record) - KEY_BYTES + 1, KEY_BYTES):
            key = record[at : at + KEY_BYTES]
            last.pop(key, None)
            last[key] = used_ns
    return last


def eviction_order(entries: Iterable[tuple[bytes, int]], last: dict[bytes, int], now_ns: int) -> list[bytes]:
    """The keys of ``entries`` (key, when it was put), in the order in which they go: leaves before their ancestors.

    What no record names is from a writer that died, or that has yet to record it: such entries go the newest first, for a
    chain is put from its first chunk on; the former before what is recorded, the latter after it.
    """
    unnamed = sorted(((put_ns, key) for key, put_ns in entries if key not in last), reverse=True)
    there = {key for key, _ in entries}
    lost = [key for put_ns, key in unnamed if put_ns < now_ns - GRACE_NS]
    fresh = [key for put_ns, key in unnamed if put_ns >= now_ns - GRACE_NS]
    return lost + [key for key in last if key in there] + fresh
