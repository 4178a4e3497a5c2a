"""Several tiers as one backend, the fastest first, such as memory, a folder and a server.

An entry read from a slower tier is copied to the faster tiers once it has been checked. A saved entry goes to all tiers before
``save`` returns (write-through), or to the first tier, and to the others in the background (write-back). Each tier evicts by
its own budget.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from kvpack.runtime.locks import Lock

from .backend import Found, Stored
from .write_back import WriteBack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .backend import Backend, Data
    from .counters import Counters

TierStats = list[dict[str, Any]]

NOTE_SECONDS = 60.0
"""How often a tier that was not asked is told that a prefix is in use; that may cost a request."""
_NOTED = 4096


class Tiers:
    """``tiers`` are pairs (backend, its counters), the fastest first; ``counters`` are those of the whole store."""

    def __init__(self, tiers: Sequence[tuple[Backend, Counters]], counters: Counters, *, write_back: bool = False) -> None:
        self._backends = [backend for backend, _ in tiers]
        self._tier_counters = [counts for _, counts in tiers]
        self._counters = counters
        self._write_back = WriteBack(self._put_below, counters) if write_back else None
        self._noted: OrderedDict[tuple[int, bytes], float] = OrderedDict()
        self._lock = Lock()

    @property
    def private(self) -> bool:
        return all(backend.private for backend in self._backends)

    @property
    def puts_at_once(self) -> int:
        waited_for = self._backends[:1] if self._write_back else self._backends
        return max(backend.puts_at_once for backend in waited_for)

    @property
    def parts(self) -> Sequence[Backend]:
        return self._backends

    def present(self, keys: Sequence[bytes]) -> int:
        found = 0
        for _, more in self._in_turn(keys, lambda backend, rest: backend.present(rest), int):
            found += more
        return found

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        return [found.data for found in self.find(keys)]

    def find(self, keys: Sequence[bytes], *, beyond: int = -1) -> list[Found]:
        return [
            Found(data, tier)
            for tier, entries in self._in_turn(keys, lambda backend, rest: backend.get(rest), len, beyond)
            for data in entries
        ]

    def accept(self, keys: Sequence[bytes], found: Sequence[Found], now_ns: int) -> None:
        for number, entry in enumerate(found, len(keys) - len(found)):
            self._tier_counters[entry.tier].add("hit_chunks")
            self._counters.add("promoted_chunks", self._put_in(self._backends[: entry.tier], keys[: number + 1], entry.data, now_ns))
        # Noting parts of a chain one by one would leave an ancestor older than its descendants.
        self.touch(keys, now_ns, asked=max((entry.tier for entry in found), default=-1))

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        return next((data for backend in self._backends if (data := backend.peek(key, front=front)) is not None), None)

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        if self._write_back is None:
            stored = _each(self._backends, lambda backend: backend.put(chain, pieces, now_ns))
        elif stored := self._backends[0].put(chain, pieces, now_ns):
            self._write_back.add(chain, b"".join(pieces), now_ns)
        else:
            # The first tier does not have it, so the others get it at once.
            stored = self._put_below(chain, b"".join(pieces), now_ns)
        self._counters.add("saved_chunks", stored)
        self._counters.add("saved_bytes", sum(map(len, pieces)) if stored else 0)
        self._counters.add("refused_chunks", not stored)
        return stored

    def touch(self, chain: Sequence[bytes], now_ns: int, *, asked: int = 0) -> None:
        for tier, backend in enumerate(self._backends):
            if chain and (tier <= asked or self._due(tier, chain[-1])):
                backend.touch(chain, now_ns)

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        if self._write_back is not None:
            self._write_back.forget(keys)
        return set().union(*(backend.delete(keys) for backend in self._backends))

    def discard(self, key: bytes, found: Found) -> None:
        # The queued entry was saved here, and another tier's copy may be good.
        self._backends[found.tier].discard(key, Found(found.data, 0))

    def list(self) -> Iterator[Stored]:
        listed: dict[bytes, Stored] = {}
        for backend in self._backends:
            for stored in backend.list():
                known = listed.get(stored.key, stored)
                listed[stored.key] = Stored(stored.key, known.size, max(known.used_ns, stored.used_ns))
        yield from listed.values()

    def size(self) -> tuple[int, int]:
        sizes = [stored.size for stored in self.list()]
        return len(sizes), sum(sizes)

    def pin(self, keys: Sequence[bytes]) -> bool:
        return _each(self._backends, lambda backend: backend.pin(keys))

    def unpin(self, keys: Sequence[bytes]) -> bool:
        return _each(self._backends, lambda backend: backend.unpin(keys))

    def pinned(self) -> set[bytes]:
        return set().union(*(backend.pinned() for backend in self._backends))

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
        """Counters, entries and bytes of every tier, the fastest first."""
        sizes = [backend.size() for backend in self._backends]
        return [
            {**counts.as_dict(), "entries": entries, "bytes": size}
            for counts, (entries, size) in zip(self._tier_counters, sizes, strict=True)
        ]

    def _put_below(self, chain: Sequence[bytes], data: Data, now_ns: int) -> bool:
        return self._put_in(self._backends[1:], chain, data, now_ns)

    def _put_in(self, backends: Sequence[Backend], chain: Sequence[bytes], data: Data, now_ns: int) -> bool:
        return _each(backends, lambda backend: backend.put(chain, [memoryview(data)], now_ns))

    def _in_turn(
        self, keys: Sequence[bytes], ask: Callable[[Backend, Sequence[bytes]], Any], count: Callable[[Any], int], beyond: int = -1
    ) -> Iterator[tuple[int, Any]]:
        """(tier, its answer) for as long as a tier has the next of ``keys``; ``count`` gives the number of keys in an answer.

        The fastest tier is asked first each time, and no tier twice for a key that it lacks; for the first key only tiers slower
        than ``beyond``.
        """
        found = 0
        ended: dict[int, int] = dict.fromkeys(range(beyond + 1), 0)
        while found < len(keys):
            for tier, backend in enumerate(self._backends):
                if ended.get(tier) == found:
                    continue
                answer = ask(backend, keys[found:])
                found += (more := count(answer))
                ended[tier] = found
                if more:
                    yield tier, answer
                    break
            else:
                return

    def _due(self, tier: int, key: bytes) -> bool:
        now = time.monotonic()
        with self._lock:
            if now - self._noted.get((tier, key), -NOTE_SECONDS) < NOTE_SECONDS:
                return False
            self._noted[tier, key] = now
            self._noted.move_to_end((tier, key))
            if len(self._noted) > _NOTED:
                self._noted.popitem(last=False)
        return True


def _each(backends: Sequence[Backend], ask: Callable[[Backend], bool]) -> bool:
    """Ask every backend, and return whether any answered yes."""
    return True in [ask(backend) for backend in backends]
