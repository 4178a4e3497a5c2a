"""The last uses of an object store's entries, for stores whose objects have no time that a reader may set.

Every user records the chains that it uses, and periodically puts a record of them next to the entries: keys, least recently used first, so
that every entry comes before its ancestors. The store's own clock dates a record. An evicting writer reads all records and merges them
(spec/store.md, Object stores). The name of a record contains the number of seconds after which its entries expire.
"""

from __future__ import annotations

import math
import os
import re
import time
from typing import TYPE_CHECKING, NamedTuple

from kvpack.runtime.locks import Lock

from .keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

INTERVAL_SECONDS = 60.0
"""The time between two records of a user; a crash loses the uses noted since the last."""
GRACE_NS = 3600 * 10**9
"""An entry that no record names may await its writer's next record if it is younger than this."""
_MAX_NOTED = 65_536
SECOND_NS = 10**9
_AGE_FACTOR = 1.25
"""Uses whose ages differ by less than this factor may become one record."""
_RECORD = re.compile(r"(?P<time>[0-9]{20})-[0-9a-f]{16}(-ttl(?P<ttl>[0-9]{1,10}))?(?P<merge_records>-merge_records)?")


class LastUse(NamedTuple):
    """The last use of an entry, in nanoseconds since 1970, and the seconds after which it then expires, if it does."""

    used_ns: int
    ttl: int | None

    def expired(self, now_ns: int) -> bool:
        """Return True if the entry has expired."""
        return self.ttl is not None and self.used_ns + self.ttl * SECOND_NS <= now_ns


class UseLog:
    """The chains that one user has used since its last record, which it puts every ``interval`` seconds. Safe to use from any thread."""

    def __init__(self, interval: float = INTERVAL_SECONDS) -> None:
        self._interval = interval
        # A dict keeps the order of insertion: the most recently used key is last.
        self._unrecorded: dict[bytes, None] = {}
        self._since = time.monotonic()
        self._lock = Lock()

    def record_use(self, chain: Sequence[bytes]) -> None:
        """Record that ``chain``, from its first chunk on, is in use."""
        with self._lock:
            if not self._unrecorded:
                self._since = time.monotonic()
            for key in reversed(chain):
                self._unrecorded.pop(key, None)
                self._unrecorded[key] = None

    def is_due(self) -> bool:
        """Return True if a record should be put."""
        with self._lock:
            waited = time.monotonic() - self._since >= self._interval
            return bool(self._unrecorded) and (waited or len(self._unrecorded) >= _MAX_NOTED)

    def unrecorded_keys(self) -> set[bytes]:
        """Return the keys that are not in any record yet."""
        with self._lock:
            return {*self._unrecorded}

    def pop_record(self) -> bytes:
        """Return the record of the noted uses, and forget them; empty if there are none."""
        with self._lock:
            unrecorded_keys, self._unrecorded = self._unrecorded, {}
        return b"".join(unrecorded_keys)


def record_name(ttl: int | None = None, merged_ns: int | None = None) -> str:
    """Create a name for a record of uses after which entries expire in ``ttl`` seconds.

    Of two records of a user with the same time, the later one sorts later. A record that merges others is named by the time of its last
    use.
    """
    expires = "" if ttl is None else f"-ttl{ttl}"
    merge_records = "" if merged_ns is None else "-merge_records"
    return f"{time.time_ns() if merged_ns is None else merged_ns:020d}-{os.urandom(8).hex()}{expires}{merge_records}"


def last_uses_in(records: Iterable[tuple[int, str, bytes]]) -> dict[bytes, LastUse]:
    """Return the keys of all records with their last uses, least recently used first.

    ``records`` are (time of its put, name, record); a record with an incomplete last key counts up to that key.
    """
    dated = []
    for put_ns, name, record in records:
        match = _RECORD.fullmatch(name.rpartition("/")[2])
        used_ns = min(put_ns, int(match["time"])) if match and match["merge_records"] else put_ns
        dated.append((used_ns, name, record, int(match["ttl"]) if match and match["ttl"] else None))
    last: dict[bytes, LastUse] = {}
    for used_ns, _, record, ttl in sorted(dated, key=lambda dated_record: dated_record[:2]):
        for at in range(0, len(record) - KEY_BYTES + 1, KEY_BYTES):
            key = record[at : at + KEY_BYTES]
            last.pop(key, None)
            last[key] = LastUse(used_ns, ttl)
    return last


def merge_records(last: Mapping[bytes, LastUse], now_ns: int) -> dict[str, bytes]:
    """Merge records by name, equivalent to ``last``, least recently used first: one record for all uses of about the same age."""
    groups: dict[tuple[int, int | None], list[bytes]] = {}
    for key, use in last.items():
        age = max(1.0, (now_ns - use.used_ns) / (INTERVAL_SECONDS * SECOND_NS))
        groups.setdefault((int(math.log(age, _AGE_FACTOR)), use.ttl), []).append(key)
    return {record_name(ttl, last[keys[-1]].used_ns): b"".join(keys) for (_, ttl), keys in groups.items()}


def eviction_order(entries: Iterable[tuple[bytes, int]], last: Mapping[bytes, LastUse], now_ns: int) -> list[bytes]:
    """Return the keys of ``entries`` (key, time of its put) in the order of eviction, leaves before their ancestors.

    An entry that no record names comes from a writer that died, or that has yet to record it. Such entries are ordered newest first,
    because a chain is put from its first chunk on: those of dead writers before recorded entries, the others after.
    """
    unnamed = sorted(((put_ns, key) for key, put_ns in entries if key not in last), reverse=True)
    present = {key for key, _ in entries}
    lost = [key for put_ns, key in unnamed if put_ns < now_ns - GRACE_NS]
    fresh = [key for put_ns, key in unnamed if put_ns >= now_ns - GRACE_NS]
    return lost + [key for key in last if key in present] + fresh
