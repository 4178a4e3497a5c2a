"""A backend that combines several tiers, fastest first, such as memory, a folder and a server.

An entry read from a slower tier is checked, and then copied to the faster tiers. A saved entry is either written to all tiers before
``save`` returns (write-through), or only to the first tier, and to the rest in the background (write-back). Each tier evicts entries to fit
its own budget.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from kvpack.runtime.threads import Lock

from .backend import Backend, Data, FoundEntry, Lease, Pin, PinTerms, StoredEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from .counters import Counters

    Write = Callable[[Sequence[bytes], bytes, int], object]

TierStats = list[dict[str, Any]]

USE_RECORD_SECONDS = 60.0
"""Interval in seconds between records of a prefix's use in a tier that was not queried. Each record may cost a request."""
_MAX_NOTED = 4096


class Tiers:
    """A backend that combines several tiers. ``tiers`` contains a (backend, counters) pair for each tier, fastest first.

    ``counters`` belong to the whole store. With ``write_back``, tiers other than the first are written in the background.
    """

    def __init__(self, tiers: Sequence[tuple[Backend, Counters]], counters: Counters, *, write_back: bool = False) -> None:
        self._backends = [backend for backend, _ in tiers]
        self._tier_counters = [counts for _, counts in tiers]
        self._counters = counters
        self._write_back = WriteBackQueue(self._put_in_slower_tiers, counters) if write_back else None
        self._noted: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        self._lock = Lock()

    @property
    def is_private(self) -> bool:
        return all(backend.is_private for backend in self._backends)

    @property
    def parts(self) -> Sequence[Backend]:
        return self._backends

    def count_present(self, keys: Sequence[bytes]) -> int:
        result = 0
        for _, count in self._query_in_turn(keys, lambda backend, rest: backend.count_present(rest), int):
            result += count
        return result

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        result = [False] * len(keys)
        for backend in self._backends:
            missing = [index for index, is_present in enumerate(result) if not is_present]
            for index, is_present in zip(
                missing, backend.contains_many([keys[index] for index in missing]) if missing else (), strict=True
            ):
                result[index] = is_present
        return result

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        return [entry.data for entry in self.find(keys)]

    def find(self, keys: Sequence[bytes], *, after_tier: int = -1) -> list[FoundEntry]:
        return [FoundEntry(data, tier) for tier, entries in self._query_in_turn(keys, self._timed_get, len, after_tier) for data in entries]

    def find_many(self, keys: Sequence[bytes], after_tiers: Sequence[int], max_bytes: int) -> list[FoundEntry | None]:
        result: list[FoundEntry | None] = [None] * len(keys)
        for tier, backend in enumerate(self._backends):
            missing = [index for index, entry in enumerate(result) if entry is None and after_tiers[index] < tier]
            with self._time_operation(backend, "load") if missing else nullcontext():
                entries = backend.find_many([keys[index] for index in missing], [-1] * len(missing), max_bytes) if missing else ()
            for index, entry in zip(missing, entries, strict=True):
                result[index] = None if entry is None else FoundEntry(entry.data, tier)
        return result

    def accept(self, keys: Sequence[bytes], entries: Sequence[FoundEntry], now_ns: int) -> None:
        first = len(keys) - len(entries)
        promoted: set[int] = set()
        for tier, (backend, counts) in enumerate(zip(self._backends, self._tier_counters, strict=True)):
            counts.add("hit_chunks", sum(entry.tier == tier for entry in entries))
            lower = {first + index: [memoryview(entry.data)] for index, entry in enumerate(entries) if entry.tier > tier}
            promoted |= {position for position, ok in zip(lower, self._put_in([backend], keys, lower, now_ns), strict=True) if ok}
        self._counters.add("promoted_chunks", len(promoted))
        # The use of the whole chain is recorded at once. Part by part, ancestors would seem older than their descendants.
        self.touch(keys, now_ns, queried=max((entry.tier for entry in entries), default=-1))

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        return self.peek_many([key], front=front)[0]

    def peek_many(self, keys: Sequence[bytes], *, front: bool = False) -> list[Data | None]:
        result: list[Data | None] = [None] * len(keys)
        for backend in self._backends:
            missing = [index for index, data in enumerate(result) if data is None]
            results = backend.peek_many([keys[index] for index in missing], front=front) if missing else ()
            for index, data in zip(missing, results, strict=True):
                result[index] = data
        return result

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        return self.put_all(chain, {len(chain) - 1: pieces}, now_ns)[0]

    def put_all(self, chain: Sequence[bytes], entries: Mapping[int, Sequence[memoryview]], now_ns: int) -> list[bool]:
        waited_for = self._backends if self._write_back is None else self._backends[:1]
        stored = [*self._put_in(waited_for, chain, entries, now_ns)]
        if self._write_back is not None:
            refused = {}
            for (position, pieces), ok in zip(entries.items(), stored, strict=True):
                if ok:
                    self._write_back.add(chain[: position + 1], b"".join(pieces), now_ns)
                else:
                    refused[position] = pieces
            # Entries that the first tier rejected are written to the other tiers immediately.
            late = dict(zip(refused, self._put_in(self._backends[1:], chain, refused, now_ns), strict=True))
            stored = [ok or late.get(position, False) for position, ok in zip(entries, stored, strict=True)]
        sizes = [sum(map(len, pieces)) for pieces in entries.values()]
        self._counters.add("saved_chunks", sum(stored))
        self._counters.add("saved_bytes", sum(size for size, ok in zip(sizes, stored, strict=True) if ok))
        self._counters.add("refused_chunks", len(stored) - sum(stored))
        return stored

    def touch(self, chain: Sequence[bytes], now_ns: int, *, queried: int = 0) -> None:
        for tier, backend in enumerate(self._backends):
            if chain and (tier <= queried or self._is_due(tier, chain[-1])):
                backend.touch(chain, now_ns)

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        if self._write_back is not None:
            self._write_back.cancel(keys)
        return set().union(*(backend.delete(keys) for backend in self._backends))

    def discard(self, key: bytes, entry: FoundEntry) -> None:
        # Only this tier's copy is removed. Copies in other tiers and in the queue may be good.
        self._backends[entry.tier].discard(key, FoundEntry(entry.data, 0))

    def list(self) -> Iterator[StoredEntry]:
        listed: dict[bytes, StoredEntry] = {}
        for backend in self._backends:
            for stored in backend.list():
                known = listed.get(stored.key, stored)
                listed[stored.key] = StoredEntry(stored.key, known.size, max(known.used_ns, stored.used_ns))
        yield from listed.values()

    def size(self) -> tuple[int, int]:
        sizes = [stored.size for stored in self.list()]
        return len(sizes), sum(sizes)

    def pin(self, keys: Sequence[bytes], terms: PinTerms) -> bool:
        return _call_each(self._backends, lambda backend: backend.pin(keys, terms))

    def unpin(self, keys: Sequence[bytes], owner: str | None = None) -> bool:
        return _call_each(self._backends, lambda backend: backend.unpin(keys, owner))

    def pins(self) -> Sequence[Pin]:
        merged = {(pin.key, pin.owner): pin for backend in self._backends for pin in backend.pins()}
        return [*merged.values()]

    def pinned_keys(self) -> set[bytes]:
        return set().union(*(backend.pinned_keys() for backend in self._backends))

    def take_lease(self, key: bytes, seconds: float) -> Lease | None:
        # The slowest tier is shared by most workers.
        return self._backends[-1].take_lease(key, seconds)

    def collect(self) -> None:
        for backend in self._backends:
            backend.collect()

    def close(self) -> None:
        """Write the queued entries, and close every tier."""
        if self._write_back is not None:
            self._write_back.close()
        for backend in self._backends:
            backend.close()

    def stats(self) -> TierStats:
        """Return the counters, entries and bytes of every tier, fastest first."""
        sizes = [backend.size() for backend in self._backends]
        return [
            {**counts.as_dict(), "entries": entries, "bytes": size}
            for counts, (entries, size) in zip(self._tier_counters, sizes, strict=True)
        ]

    def histograms(self) -> str:
        """Return histograms of the duration of each tier's loads and saves, in Prometheus' text format."""
        name = "kvpack_store_tier_seconds"
        lines = [f"# HELP {name} Duration of calls to a tier in seconds, by operation.", f"# TYPE {name} histogram"]
        for tier, counts in enumerate(self._tier_counters):
            lines += counts.histogram(name, {"tier": str(tier)})
        return "\n".join(lines) + "\n"

    def _time_operation(self, backend: Backend, operation: str) -> AbstractContextManager[None]:
        index = next(index for index, other in enumerate(self._backends) if other is backend)
        return self._tier_counters[index].time_operation(operation)

    def _timed_get(self, backend: Backend, keys: Sequence[bytes]) -> Sequence[Data]:
        with self._time_operation(backend, "load"):
            return backend.get(keys)

    def _put_in_slower_tiers(self, chain: Sequence[bytes], data: Data, now_ns: int) -> bool:
        return self._put_in(self._backends[1:], chain, {len(chain) - 1: [memoryview(data)]}, now_ns)[0]

    def _put_in(
        self, backends: Sequence[Backend], chain: Sequence[bytes], entries: Mapping[int, Sequence[memoryview]], now_ns: int
    ) -> Sequence[bool]:
        """Put entries into all ``backends``. Returns True for each entry that any backend has stored."""
        answers = []
        for backend in backends if entries else ():
            with self._time_operation(backend, "save"):
                answers.append(backend.put_all(chain, entries, now_ns))
        return [any(results) for results in zip(*answers, strict=True)] if answers else [False] * len(entries)

    def _query_in_turn(
        self,
        keys: Sequence[bytes],
        query: Callable[[Backend, Sequence[bytes]], Any],
        count_keys: Callable[[Any], int],
        after_tier: int = -1,
    ) -> Iterator[tuple[int, Any]]:
        """Query the tiers for ``keys``, in order, and yield (tier, reply) pairs until no tier has the next key.

        ``count_keys`` counts the keys in a reply. For each missing key, the fastest tier is queried first. No tier is queried twice for a
        key that it lacks. The first key is searched for only in tiers slower than ``after_tier``.
        """
        found = 0
        exhausted_at: dict[int, int] = dict.fromkeys(range(after_tier + 1), 0)
        while found < len(keys):
            for tier, backend in enumerate(self._backends):
                if exhausted_at.get(tier) == found:
                    continue
                answer = query(backend, keys[found:])
                count = count_keys(answer)
                found += count
                exhausted_at[tier] = found
                if count:
                    yield tier, answer
                    break
            else:
                return

    def _is_due(self, tier: int, key: bytes) -> bool:
        now = time.monotonic()
        with self._lock:
            if now - self._noted.get((tier, key), -USE_RECORD_SECONDS) < USE_RECORD_SECONDS:
                return False
            self._noted[tier, key] = now
            self._noted.move_to_end((tier, key))
            if len(self._noted) > _MAX_NOTED:
                self._noted.popitem(last=False)
        return True


def prometheus_text(counters: Counters, backend: Backend, gauges: Mapping[str, tuple[str, int]]) -> str:
    if not isinstance(backend, Tiers):
        return counters.prometheus(gauges)
    return counters.prometheus(gauges, backend.stats()) + backend.histograms()


def _call_each(backends: Sequence[Backend], call: Callable[[Backend], bool]) -> bool:
    return True in [call(backend) for backend in backends]


QUEUE_BYTES = 256 * 2**20
"""Maximum number of queued bytes. An entry that does not fit is dropped, because the engine must not wait."""
FLUSH_SECONDS = 30.0
"""Maximum time in seconds that ``close`` waits for the queued entries."""


class WriteBackQueue:
    """A queue of entries to write. A thread calls ``write(chain, entry, now_ns)`` in the order of ``add``, and ends with the last entry.

    Safe to use from any thread. After a fork, the child's queue is empty, and the parent still writes its entries.
    """

    _queue: OrderedDict[bytes, tuple[Sequence[bytes], bytes, int]]
    _bytes: int
    _writing: bytes | None
    _thread: threading.Thread | None

    def __init__(self, write: Write, counters: Counters) -> None:
        self._write, self._counters = write, counters
        self._reset()

    def add(self, chain: Sequence[bytes], data: bytes, now_ns: int) -> None:
        """Queue an entry. If there is no room, the entry is dropped and counted."""
        self._reset_in_child()
        with self._lock:
            if self._bytes + len(data) > QUEUE_BYTES:
                self._counters.add("dropped_writes")
                return
            if chain[-1] in self._queue:
                return
            self._queue[chain[-1]] = (chain, data, now_ns)
            self._bytes += len(data)
            if self._thread is None:
                # Not a daemon: a program that ends without closing the store waits for its entries.
                self._thread = threading.Thread(target=self._run, name="kvpack-write-back")
                try:
                    self._thread.start()
                except RuntimeError:
                    # The system's limit of threads. The next entry or ``close`` tries again.
                    self._thread = None

    def cancel(self, keys: Iterable[bytes]) -> None:
        """Drop the queued entries of ``keys``. If one of them is being written, wait for that to finish."""
        self._reset_in_child()
        forgotten = set(keys)
        with self._lock:
            for key in forgotten & set(self._queue):
                self._bytes -= len(self._queue.pop(key)[1])
            while self._writing in forgotten:
                self._condition.wait()
            self._condition.notify_all()

    def close(self) -> None:
        """Write queued entries for at most ``FLUSH_SECONDS``. The remaining ones are dropped and counted."""
        self._reset_in_child()
        deadline = time.monotonic() + FLUSH_SECONDS
        if self._thread is None:
            self._run()
        with self._lock:
            while (self._queue or self._writing is not None) and time.monotonic() < deadline:
                self._condition.wait(max(0, deadline - time.monotonic()))
            self._counters.add("dropped_writes", len(self._queue))
            self._queue.clear()
            self._bytes = 0

    def _run(self) -> None:
        while True:
            with self._lock:
                self._writing = None
                self._condition.notify_all()
                if not self._queue:
                    self._thread = None
                    return
                self._writing, (chain, data, now_ns) = self._queue.popitem(last=False)
            try:
                self._write(chain, data, now_ns)
            except Exception as error:
                self._counters.fault("put", error)
            with self._lock:
                self._bytes -= len(data)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._queue = OrderedDict()
        self._bytes = 0
        self._writing = self._thread = None

    def _reset_in_child(self) -> None:
        if os.getpid() != self._pid:
            self._reset()
