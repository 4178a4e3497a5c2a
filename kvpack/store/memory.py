"""The memory backend. It keeps entries in this process's memory, usually as the fastest tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvpack.runtime.threads import Lock

from .backend import Data, FoundEntry, Pin, PinTerms, SingleTierBackend, StoredEntry
from .counters import Counters
from .pins import is_active


class MemoryBackend(SingleTierBackend):
    """A backend that holds at most ``max_bytes`` bytes of entries in memory.

    Evicts the least recently used entries first, and descendants before ancestors.
    """

    is_private = True

    def __init__(self, counters: Counters, *, max_bytes: int) -> None:
        self._counters, self._max_bytes = counters, max_bytes
        # Ordered by last use, oldest first; an ancestor's last use is always later than its descendants'.
        self._entries: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()
        self._total = 0
        self._pins: dict[tuple[bytes, str], Pin] = {}
        self._lock = Lock()

    def count_present(self, keys: Sequence[bytes]) -> int:
        with self._lock:
            return next((index for index, key in enumerate(keys) if key not in self._entries), len(keys))

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        result: list[Data] = []
        for key in keys:
            data = self.peek(key)
            if data is None:
                break
            result.append(data)
        return result

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        with self._lock:
            data, _ = self._entries.get(key, (None, 0))
        try:
            # Callers get a copy, because the caches built on it are writable.
            return None if data is None else bytearray(data)
        except MemoryError as error:
            self._counters.fault("get", error)
            return None

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        key, size = chain[-1], sum(map(len, pieces))
        with self._lock:
            if key in self._entries:
                return True
            if not self._make_room(size, set(chain)):
                self._counters.add("refused_chunks")
                return False
            try:
                self._entries[key] = (b"".join(pieces), now_ns)
            except MemoryError as error:
                self._counters.fault("put", error)
                return False
            self._total += size
        self._counters.add("saved_chunks")
        self._counters.add("saved_bytes", size)
        self.touch(chain, now_ns)
        return True

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        with self._lock:
            for key in reversed(chain):
                if key in self._entries:
                    data, recorded_ns = self._entries[key]
                    self._entries[key] = (data, max(recorded_ns, now_ns))
                    self._entries.move_to_end(key)

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        with self._lock:
            return {key for key in reversed(keys) if self._remove(key)}

    def discard(self, key: bytes, entry: FoundEntry) -> None:
        self.delete([key])

    def list(self) -> Iterator[StoredEntry]:
        with self._lock:
            entries = [StoredEntry(key, len(data), used_ns) for key, (data, used_ns) in self._entries.items()]
        yield from entries

    def size(self) -> tuple[int, int]:
        with self._lock:
            return len(self._entries), self._total

    def pin(self, keys: Sequence[bytes], terms: PinTerms) -> bool:
        with self._lock:
            self._pins[keys[-1], terms.owner] = Pin(tuple(keys), *terms)
        return True

    def unpin(self, keys: Sequence[bytes], owner: str | None = None) -> bool:
        with self._lock:
            result = [name for name in self._pins if name[0] == keys[-1] and owner in (None, name[1])]
            removed = [self._pins.pop(name) for name in result]
        return any(map(is_active, removed))

    def pins(self) -> Sequence[Pin]:
        with self._lock:
            return self._active_pins()

    def collect(self) -> None:
        """Do nothing, because entries never exceed the budget."""

    def close(self) -> None:
        """Do nothing. Entries are kept as long as the store object exists."""

    def _active_pins(self) -> Sequence[Pin]:
        self._pins = {name: pin for name, pin in self._pins.items() if is_active(pin)}
        return [*self._pins.values()]

    def _make_room(self, size: int, chain: set[bytes]) -> bool:
        excess = self._total + size - self._max_bytes
        protected = chain.union(*(pin.chain for pin in self._active_pins()))
        to_evict = []
        for key, (data, _) in self._entries.items():
            if excess <= 0:
                break
            if key not in protected:
                to_evict.append(key)
                excess -= len(data)
        if excess > 0:
            return False
        for key in to_evict:
            self._counters.add("evicted_entries")
            self._counters.add("evicted_bytes", self._remove(key))
        return True

    def _remove(self, key: bytes) -> int:
        data, _ = self._entries.pop(key, (b"", 0))
        self._total -= len(data)
        return len(data)
