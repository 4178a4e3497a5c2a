"""The interface of a store's backend, which maps keys to entries of bytes. Any entry may disappear at any time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol, TypeVar

Item = TypeVar("Item")


class Lease(Protocol):
    """A lease on a key, which a backend grants to one holder at a time."""

    def release(self) -> None:
        """End the lease unless it has already ended. Never raises."""


class NoLease:
    """A placeholder returned by backends without leases. Every caller gets one, so no caller waits."""

    def release(self) -> None:
        """Do nothing, because there is no lease to release."""


Data = bytes | bytearray | memoryview
"""The bytes of an entry, in a mapped file if possible."""


MAX_ENTRY_BYTES = 512 * 2**20
"""Default maximum size of one entry in bytes, which is also Redis's limit for a string. Larger entries are never read."""

BATCH_ENTRIES, BATCH_BYTES = 64, 64 * 2**20
"""Limits of one ``put_all`` call: the number of entries, and their total bytes. A single larger entry is allowed."""


def batches(items: Iterable[tuple[Item, int]], count: int, total: int) -> Iterator[list[Item]]:
    """Split ``items``, pairs of an item and its size in bytes, into batches of at most ``count`` items and ``total`` bytes.

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
    """A listed entry: its key, its size in bytes, and the time of its last use in nanoseconds since 1970 (0 if unknown)."""

    key: bytes
    size: int
    used_ns: int


@dataclass(frozen=True)
class FoundEntry:
    """An entry that a backend returned: its unchecked bytes, and the index of the tier that had it (0 is the fastest)."""

    data: Data
    tier: int


class PinTerms(NamedTuple):
    """The terms of a pin: its owner, and its end in seconds since 1970."""

    owner: str
    until: int


class Pin(NamedTuple):
    """A pinned chain, its owner, and the end of the pin in seconds since 1970. Pins of earlier versions have no owner and no end."""

    chain: tuple[bytes, ...]
    owner: str
    until: int | None

    @property
    def key(self) -> bytes:
        return self.chain[-1]


class Backend(Protocol):
    """A container of entries by key. Methods do not raise if the system or the server fails: they count the fault and report a miss.

    Keys are passed in chain order, ancestors first. Entries above the size limit are never read and count as missing.
    """

    @property
    def is_private(self) -> bool:
        """True if only this user can have written the entries, so that checking digests is enough."""

    @property
    def parts(self) -> Sequence[Backend]:
        """The backend of each tier, fastest first."""

    def count_present(self, keys: Sequence[bytes]) -> int:
        """Return how many ``keys``, counted up to the first missing one, have an entry in a format that this store reads."""

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Return, for each of ``keys``, whether it has an entry. The keys need not form a chain."""

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        """Return the bytes of the entries of ``keys``, in order, up to the first missing entry."""

    def find_many(self, keys: Sequence[bytes], beyond: Sequence[int], max_bytes: int) -> list[FoundEntry | None]:
        """Return the entry of each of ``keys``, or None if it is missing. The keys need not form a chain.

        Each entry must come from a tier slower than the tier index at the same position of ``beyond``. A server sends at most ``max_bytes``
        + 1 bytes of an entry, which is enough for the size check to reject a larger entry.
        """

    def find(self, keys: Sequence[bytes], *, beyond: int = -1) -> list[FoundEntry]:
        """Return entries as ``get`` does, with their tiers. The entry of the first key must come from a tier slower than ``beyond``."""

    def accept(self, keys: Sequence[bytes], entries: Sequence[FoundEntry], now_ns: int) -> None:
        """Record a use of the chain ``keys``, and copy its last ``entries``, which have been checked, to faster tiers."""

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        """Return the bytes of one entry for inspection, or None, without recording a use.

        With ``front``, only the bytes before a kvpack file's payload need to be correct.
        """

    def peek_many(self, keys: Sequence[bytes], *, front: bool = False) -> list[Data | None]:
        """Return what ``peek`` returns for each of ``keys``. The caller limits the number of bytes requested."""

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        """Store the last entry of ``chain`` unless it exists. Returns True if a readable entry exists now.

        ``now_ns`` is the time of use. Junk (``entry_kind.Kind.JUNK``) is replaced. An entry that another store may be able to read is kept.
        """

    def put_all(self, chain: Sequence[bytes], entries: Mapping[int, Sequence[memoryview]], now_ns: int) -> list[bool]:
        """Store several entries of one chain in order. Returns for each of them what ``put`` would return.

        ``entries`` maps positions in ``chain`` to the pieces of an entry. The first entry that cannot be stored ends the call, so that it
        waits for room at most once.
        """

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        """Record a use of ``chain``, which starts with its first chunk."""

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        """Remove entries, last key first. Returns the keys that had an entry."""

    def discard(self, key: bytes, entry: FoundEntry) -> None:
        """Remove the damaged ``entry`` of ``key`` from the tier that returned it."""

    def list(self) -> Iterator[StoredEntry]:
        """Yield every entry, in any order."""

    def size(self) -> tuple[int, int]:
        """Return the number of entries and their total size in bytes."""

    def pin(self, keys: Sequence[bytes], terms: PinTerms) -> bool:
        """Protect a chain from eviction by any process until ``unpin`` or ``terms.until``. Returns True if the chain is pinned now."""

    def unpin(self, keys: Sequence[bytes], owner: str | None = None) -> bool:
        """Remove the pins that ``owner`` (None for anyone) has set on a chain. Returns True if there were any."""

    def pins(self) -> Sequence[Pin]:
        """Return the pins in effect."""

    def pinned_keys(self) -> set[bytes]:
        """Return the pinned keys."""

    def take_lease(self, key: bytes, seconds: float) -> Lease | None:
        """Acquire the lease of ``key`` for at most ``seconds`` seconds (leases.py). Returns None while another holder has it.

        Returns a ``NoLease`` if leases are not possible, for example after a fault.
        """

    def collect(self) -> None:
        """Remove unfinished files, recount the entries, and evict entries until they fit the budget."""

    def close(self) -> None:
        """Release connections. Entries are kept."""


class SingleTierBackend:
    """A base class of backends with a single tier. Backends that query a server override the methods that work one key at a time."""

    @property
    def parts(self: Backend) -> Sequence[Backend]:
        """The only tier's backend, which is this one."""
        return [self]

    def find(self: Backend, keys: Sequence[bytes], *, beyond: int = -1) -> list[FoundEntry]:
        """Implement ``Backend.find`` for a backend without a slower tier."""
        return [FoundEntry(data, 0) for data in self.get(keys)] if beyond < 0 else []

    def contains_many(self: Backend, keys: Sequence[bytes]) -> list[bool]:
        return [self.count_present([key]) == 1 for key in keys]

    def find_many(self: Backend, keys: Sequence[bytes], beyond: Sequence[int], max_bytes: int) -> list[FoundEntry | None]:
        result = [self.find([key], beyond=tier) for key, tier in zip(keys, beyond, strict=True)]
        return [entries[0] if entries else None for entries in result]

    def peek_many(self: Backend, keys: Sequence[bytes], *, front: bool = False) -> list[Data | None]:
        return [self.peek(key, front=front) for key in keys]

    def put_all(self: Backend, chain: Sequence[bytes], entries: Mapping[int, Sequence[memoryview]], now_ns: int) -> list[bool]:
        stored = takewhile(bool, (self.put(chain[: position + 1], pieces, now_ns) for position, pieces in entries.items()))
        count = sum(stored)
        return [index < count for index in range(len(entries))]

    def pinned_keys(self: Backend) -> set[bytes]:
        """Implement ``Backend.pinned_keys`` with the pins in effect."""
        return {key for pin in self.pins() for key in pin.chain}

    def take_lease(self: Backend, key: bytes, seconds: float) -> Lease | None:
        """Implement ``Backend.take_lease`` for a backend that others cannot reach."""
        return NoLease()

    def accept(self: Backend, keys: Sequence[bytes], entries: Sequence[FoundEntry], now_ns: int) -> None:
        """Implement ``Backend.accept`` for a backend without a faster tier."""
        self.touch(keys, now_ns)
