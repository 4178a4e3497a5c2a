"""The last uses of an object store's entries. Readers cannot set the times of objects, so uses are stored in separate records.

Every store instance notes the chains that it uses, and periodically puts a record of their keys. Keys are ordered by last use, so that
every entry precedes its ancestors. The object store's clock dates the record. Before evicting, a writer reads and merges all records
(spec/store.md, Object stores). A record's name contains the number of seconds after which its entries expire.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvpack.runtime.threads import Lock

from .keys import KEY_BYTES

INTERVAL_SECONDS = 60.0
"""Interval in seconds between two records of a store instance. A crash loses the uses since the last record."""
GRACE_NS = 3600 * 10**9
"""An entry younger than this many nanoseconds that is in no record may be waiting for its writer's next record."""
_MAX_NOTED = 65_536
SECOND_NS = 10**9
_AGE_FACTOR = 1.25
"""Uses are merged into one record if the ratio of their ages is at most this."""
_RECORD = re.compile(r"(?P<time>[0-9]{20})-[0-9a-f]{16}(-ttl(?P<ttl>[0-9]{1,10}))?(?P<merged>-merged)?")


class LastUse(NamedTuple):
    """An entry's last use, in nanoseconds since 1970, and its time to live in seconds (None for unlimited)."""

    used_ns: int
    ttl: int | None

    def has_expired(self, now_ns: int) -> bool:
        return self.ttl is not None and self.used_ns + self.ttl * SECOND_NS <= now_ns


class UseLog:
    """The keys used since the last record. A record should be put every ``interval`` seconds. Safe to use from any thread."""

    def __init__(self, interval: float = INTERVAL_SECONDS) -> None:
        self._interval = interval
        # A dict keeps the order of insertion: the most recently used key is last.
        self._unrecorded: dict[bytes, None] = {}
        self._since = time.monotonic()
        self._lock = Lock()

    def record_use(self, chain: Sequence[bytes]) -> None:
        """Note a use of ``chain``, which starts with its first chunk."""
        with self._lock:
            if not self._unrecorded:
                self._since = time.monotonic()
            for key in reversed(chain):
                self._unrecorded.pop(key, None)
                self._unrecorded[key] = None

    def is_due(self) -> bool:
        """Return True if it is time to write a new record."""
        with self._lock:
            waited = time.monotonic() - self._since >= self._interval
            return bool(self._unrecorded) and (waited or len(self._unrecorded) >= _MAX_NOTED)

    def unrecorded_keys(self) -> set[bytes]:
        """Return the keys whose use is not yet in a record."""
        with self._lock:
            return {*self._unrecorded}

    def pop_record(self) -> bytes:
        """Return a record, possibly empty, of the uses since the last record, and forget these uses."""
        with self._lock:
            unrecorded_keys, self._unrecorded = self._unrecorded, {}
        return b"".join(unrecorded_keys)


def record_name(ttl: int | None = None, merged_ns: int | None = None) -> str:
    """Return a new name for a record whose entries expire ``ttl`` seconds after their last use (None for never).

    Names sort by time. The name of a merged record starts with its last use, ``merged_ns``.
    """
    expires = "" if ttl is None else f"-ttl{ttl}"
    merged = "" if merged_ns is None else "-merged"
    return f"{time.time_ns() if merged_ns is None else merged_ns:020d}-{os.urandom(8).hex()}{expires}{merged}"


def parse_last_uses(records: Iterable[tuple[int, str, bytes]]) -> dict[bytes, LastUse]:
    """Return the last use of each key in ``records``, least recently used first.

    ``records`` are (time of the put, name, bytes) triples. An incomplete key at the end of a record is ignored.
    """
    dated = []
    for put_ns, name, record in records:
        match = _RECORD.fullmatch(name.rpartition("/")[2])
        used_ns = min(put_ns, int(match["time"])) if match and match["merged"] else put_ns
        dated.append((used_ns, name, record, int(match["ttl"]) if match and match["ttl"] else None))
    last: dict[bytes, LastUse] = {}
    for used_ns, _, record, ttl in sorted(dated, key=lambda dated_record: dated_record[:2]):
        for at in range(0, len(record) - KEY_BYTES + 1, KEY_BYTES):
            key = record[at : at + KEY_BYTES]
            last.pop(key, None)
            last[key] = LastUse(used_ns, ttl)
    return last


def merge_records(last: Mapping[bytes, LastUse], now_ns: int) -> dict[str, bytes]:
    """Merge the uses in ``last``, in ascending order, into one record per range of ages. Returns the records by name."""
    groups: dict[tuple[int, int | None], list[bytes]] = {}
    for key, use in last.items():
        age = max(1.0, (now_ns - use.used_ns) / (INTERVAL_SECONDS * SECOND_NS))
        groups.setdefault((int(math.log(age, _AGE_FACTOR)), use.ttl), []).append(key)
    return {record_name(ttl, last[keys[-1]].used_ns): b"".join(keys) for (_, ttl), keys in groups.items()}


def eviction_order(entries: Iterable[tuple[bytes, int]], last: Mapping[bytes, LastUse], now_ns: int) -> list[bytes]:
    """Return the keys of ``entries`` in the order of eviction, descendants before ancestors. ``entries`` are (key, time of the put) pairs.

    Entries are in no record if their writer has died or has not put its record yet. The old ones among them come first, and the recent ones
    last. Both are ordered from newest to oldest, because a chain's ancestors are put before its descendants.
    """
    unnamed = sorted(((put_ns, key) for key, put_ns in entries if key not in last), reverse=True)
    present = {key for key, _ in entries}
    lost = [key for put_ns, key in unnamed if put_ns < now_ns - GRACE_NS]
    fresh = [key for put_ns, key in unnamed if put_ns >= now_ns - GRACE_NS]
    return lost + [key for key in last if key in present] + fresh
