"""The interface of a store's backend, which maps keys to entries (byte strings). Any entry may disappear at any time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol, TypeVar

Item = TypeVar("Item")


class Lease(Protocol):
    """A lease on a key. A backend grants it to one holder at a time."""

    def release(self) -> None:
        """End the lease unless it has already ended. Never raises."""


class NoLease:
    """A lease that never blocks another caller. Backends that do not support leases return it."""

    def release(self) -> None:
        ...


Data = bytes | bytearray | memoryview
"""An entry's bytes, memory-mapped if possible."""


MAX_ENTRY_BYTES = 512 * 2**20
"""Default maximum size of one entry in bytes, which is also Redis's limit for a string. Larger entries are never read."""

BATCH_ENTRIES, BATCH_BYTES = 64, 64 * 2**20
"""Limits of one ``put_all`` call: the number of entries, and their total bytes. A single larger entry is allowed."""


def batches(items: Iterable[tuple[Item, int]], count: int, total: int) -> Iterator[list[Item]]:
    """Split ``items``, which are (item, size in bytes) pairs, into batches of at most ``count`` items and ``total`` bytes.

    An item larger than ``total`` gets its own batch.
    """
    batch: list[Item] = []
    left = total
    for item, size in items:
        if batch and (len(batch) == count or size > left):
            yield batch
            batch, left = [], total
        batch.append(item)
        left -= size
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A listed entry. ``size`` is in bytes. ``used_ns`` is the time of its last use in nanoseconds since 1970, or 0 if unknown."""

    key: bytes
    size: int
    used_ns: int


@dataclass(frozen=True)
class FoundEntry:
    """An entry that a backend returned. Its bytes are unchecked. ``tier`` is the index of the tier that it came from (0 is the fastest)."""

    data: Data
    tier: int


class PinTerms(NamedTuple):
    """The owner of a pin to set, and the pin's end in seconds since 1970."""

    owner: str
    until: int


class Pin(NamedTuple):
    """A pinned chain, the pin's owner, and the pin's end in seconds since 1970."""

    chain: tuple[bytes, ...]
    owner: str
    until: int

    @property
    def key(self) -> bytes:
        return self.chain[-1]


class Backend(Protocol):
    """A key-value container for entries. If the system or the server fails, methods count a fault and report a miss instead of raising.

    Keys are passed in chain order, ancestors first. Entries above the size limit are never read and count as missing.
    """

    @property
    def is_private(self) -> bool:
        """True if only this user can have written the entries, so that checking digests is enough."""

    @property
    def parts(self) -> Sequence[Backend]:
        """The backend of each tier, fastest first."""

    def count_present(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading ``keys`` that have an entry in a format that this store reads."""

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return a bool for each of ``keys``: True if it has an entry. The keys need not form a chain."""

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        """Return the bytes of the entries of ``keys``, in order, up to the first missing entry."""

    def find_many(self, keys: Sequence[bytes], after_tiers: Sequence[int], max_bytes: int) -> list[FoundEntry | None]:
        """Return the entry of each of ``keys``, or None if it is missing. The keys need not form a chain.

        For each key, only tiers slower than the one in ``after_tiers`` are searched. A server sends at most ``max_bytes`` + 1 bytes of an
        entry, so that the size check rejects a larger one.
        """

    def find(self, keys: Sequence[bytes], *, after_tier: int = -1) -> list[FoundEntry]:
        """Return entries as ``get`` does, together with their tiers.

        The first key is searched for only in tiers slower than ``after_tier``.
        """

    def accept(self, keys: Sequence[bytes], entries: Sequence[FoundEntry], now_ns: int) -> None:
        """Record a use of the chain ``keys``, and copy ``entries`` to faster tiers.

        ``entries`` are the chain's last entries, which the caller has already checked.
        """

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        """Return the bytes of one entry for inspection, or None if it is missing. This does not count as a use.

        With ``front``, only the bytes before the payload of a kvpack file have to be correct.
        """

    def peek_many(self, keys: Sequence[bytes], *, front: bool = False) -> list[Data | None]:
        """Return the result of ``peek`` for each of ``keys``. The caller must limit the total size of the entries."""

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        """Store the last entry of ``chain``, whose bytes are in ``pieces``, unless it exists. Returns True if a readable entry exists now.

        ``now_ns`` is the time of use. An existing entry is replaced only if it is junk (``entry_kind.EntryKind.JUNK``), because other
        stores may be able to read any other entry.
        """

    def put_all(self, chain: Sequence[bytes], entries: Mapping[int, Sequence[memoryview]], now_ns: int) -> list[bool]:
        """Store several entries of one chain in order. Returns the result of ``put`` for each entry.

        ``entries`` maps positions in ``chain`` to the byte buffers of an entry. The call stops at the first entry that cannot be stored.
        """

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        """Record a use of ``chain``, which begins with the first chunk of a prefix."""

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        """Remove entries, last key first. Returns the keys that had an entry."""

    def discard(self, key: bytes, entry: FoundEntry) -> None:
        """Remove ``entry``, the damaged entry of ``key``, from the tier that returned it."""

    def list(self) -> Iterator[StoredEntry]:
        """Yield every entry, in any order."""

    def size(self) -> tuple[int, int]:
        """Return the number of entries and their total size in bytes."""

    def pin(self, keys: Sequence[bytes], terms: PinTerms) -> bool:
        """Protect a chain from eviction by any process until ``unpin`` or ``terms.until``. Returns True on success."""

    def unpin(self, keys: Sequence[bytes], owner: str | None = None) -> bool:
        """Remove the pins that ``owner`` has set on a chain, or all of its pins if ``owner`` is None. Returns True if any were removed."""

    def pins(self) -> Sequence[Pin]:
        ...

    def pinned_keys(self) -> set[bytes]:
        ...

    def take_lease(self, key: bytes, seconds: float) -> Lease | None:
        """Acquire the lease on ``key`` for at most ``seconds`` seconds. Returns None if another worker holds it.

        Returns a ``NoLease`` if leases are not available, for example after a fault.
        """

    def collect(self) -> None:
        """Remove unfinished files, recount the entries, and evict entries until the rest fits the budget."""

    def close(self) -> None:
        """Release connections. Entries are kept."""


class SingleTierBackend:
    """Base class for backends with a single tier. Its batch methods call the methods for one key. Server backends override them."""

    @property
    def parts(self: Backend) -> Sequence[Backend]:
        """A list that contains only this backend."""
        return [self]

    def find(self: Backend, keys: Sequence[bytes], *, after_tier: int = -1) -> list[FoundEntry]:
        """Implement ``Backend.find``. There is no slower tier."""
        return [FoundEntry(data, 0) for data in self.get(keys)] if after_tier < 0 else []

    def contains_many(self: Backend, keys: Sequence[bytes]) -> list[bool]:
        return [self.count_present([key]) == 1 for key in keys]

    def find_many(self: Backend, keys: Sequence[bytes], after_tiers: Sequence[int], max_bytes: int) -> list[FoundEntry | None]:
        result = [self.find([key], after_tier=tier) for key, tier in zip(keys, after_tiers, strict=True)]
        return [entries[0] if entries else None for entries in result]

    def peek_many(self: Backend, keys: Sequence[bytes], *, front: bool = False) -> list[Data | None]:
        return [self.peek(key, front=front) for key in keys]

    def put_all(self: Backend, chain: Sequence[bytes], entries: Mapping[int, Sequence[memoryview]], now_ns: int) -> list[bool]:
        stored = takewhile(bool, (self.put(chain[: position + 1], pieces, now_ns) for position, pieces in entries.items()))
        count = sum(stored)
        return [index < count for index in range(len(entries))]

    def pinned_keys(self: Backend) -> set[bytes]:
        return {key for pin in self.pins() for key in pin.chain}

    def take_lease(self: Backend, key: bytes, seconds: float) -> Lease | None:
        """Implement ``Backend.take_lease`` for a backend that is private to this process."""
        return NoLease()

    def accept(self: Backend, keys: Sequence[bytes], entries: Sequence[FoundEntry], now_ns: int) -> None:
        """Implement ``Backend.accept``. There is no faster tier."""
        self.touch(keys, now_ns)
