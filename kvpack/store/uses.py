"""The last uses of an object store's entries, for stores whose objects have no time that a reader may set.

Every user notes the chains that it uses and periodically puts a record of them next to the entries: keys, the least recently
used first, and so every entry before its ancestors. The store's own clock dates a record. An evicting writer reads all records
and replaces them by one (spec/store.md, Object stores).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from kvpack.runtime.locks import Lock

from .keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

INTERVAL_SECONDS = 60.0
"""The time between two records of a user; a crash loses the uses noted since the last."""
GRACE_NS = 3600 * 10**9
"""An entry that no record names may await its writer's next record if it is younger than this."""
_MOST_NOTED = 65_536


class Uses:
    """The chains that one user has used since its last record. Safe to use from any thread."""

    def __init__(self) -> None:
        # A dict keeps the order of insertion: the most recently used key is last.
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
        """The record of the noted uses, which are then forgotten; empty if there are none."""
        with self._lock:
            noted, self._noted = self._noted, {}
        return b"".join(noted)


def record_name() -> str:
    """A new name for a record: of two records of a user with the same time, the later one sorts later."""
    return f"{time.time_ns():020d}-{os.urandom(8).hex()}"


def order_of(records: Iterable[tuple[int, str, bytes]]) -> dict[bytes, int]:
    """The keys of all records with the times of their last uses, the least recently used first.

    ``records`` are (time, name, record); a record with an incomplete last key counts up to that key.
    """
    last: dict[bytes, int] = {}
    for used_ns, _, record in sorted(records):
        for at in range(0, len(record) - KEY_BYTES + 1, KEY_BYTES):
            key = record[at : at + KEY_BYTES]
            last.pop(key, None)
            last[key] = used_ns
    return last


def eviction_order(entries: Iterable[tuple[bytes, int]], last: dict[bytes, int], now_ns: int) -> list[bytes]:
    """The keys of ``entries`` (key, time of its put), in the order of eviction: leaves before their ancestors.

    An entry that no record names is from a writer that died, or that has yet to record it. Such entries go the newest first,
    because a chain is put from its first chunk on: those of dead writers before recorded entries, the others after.
    """
    unnamed = sorted(((put_ns, key) for key, put_ns in entries if key not in last), reverse=True)
    there = {key for key, _ in entries}
    lost = [key for put_ns, key in unnamed if put_ns < now_ns - GRACE_NS]
    fresh = [key for put_ns, key in unnamed if put_ns >= now_ns - GRACE_NS]
    return lost + [key for key in last if key in there] + fresh
