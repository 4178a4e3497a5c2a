"""The interface of a store's backend: bytes by key, any of which may disappear at any time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple, Protocol


class Lease(Protocol):
    """A lease, which a backend grants to one holder at a time."""

    def release(self) -> None:
        """End the lease unless it has already ended. Raises nothing."""


class NoLease:
    """The lease of a location that does not support leases: everyone has it."""

    def release(self) -> None:
        """Do nothing: there is no lease to release."""


Data = bytes | bytearray | memoryview
"""The bytes of an entry: a mapped file if possible."""


MAX_ENTRY_BYTES = 512 * 2**20
"""The default limit for the bytes of one entry, and Redis' limit for one string; a larger entry is never read."""

BATCH_ENTRIES, BATCH_BYTES = 64, 64 * 2**20
"""Maximum number of entries, and of their bytes (at least one entry), that a writer passes to one ``put_all``."""


@dataclass(frozen=True)
class StoredEntry:
    """One entry of a listing: its key, its size in bytes, and its last use in nanoseconds since 1970 (0: unknown)."""

    key: bytes
    size: int
    used_ns: int


@dataclass(frozen=True)
class FoundEntry:
    """An entry from a backend: its bytes, not yet checked, and the number of the tier that they came from (0: the fastest)."""

    data: Data
    tier: int


class Hold(NamedTuple):
    """The owner of a pin, and its end in seconds since 1970."""

    owner: str
    until: int


class Pin(NamedTuple):
    """A pinned chain, its owner, and when it ends in seconds since 1970; pins of earlier versions have neither owner nor end."""

    chain: tuple[bytes, ...]
    owner: str
    until: int | None

    @property
    def key(self) -> bytes:
        """The last key of the chain."""
        return self.chain[-1]


class Backend(Protocol):
    """Entries by key. No method raises for a fault of the system or the server: it counts the fault and reports a miss.

    Keys are passed in the order of a chain, ancestors first. Anything larger than the limit for entries (entry_kind.py) is never read and
    counts as missing.
    """

    @property
    def private(self) -> bool:
        """True if only this user can have written the entries, so that checking digests is enough."""

    @property
    def parts(self) -> Sequence[Backend]:
        """The backends of the tiers, fastest first."""

    def present(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading ``keys`` are present as entries of the store's form."""

    def present_each(self, keys: Sequence[bytes]) -> list[bool]:
        """Return, for each of ``keys``, True if it is present. The keys need not be a chain."""

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        """Return the bytes of the entries of ``keys``, up to the first missing one."""

    def find_each(self, keys: Sequence[bytes], beyond: Sequence[int], max_bytes: int) -> list[FoundEntry | None]:
        """Return the entry of each of ``keys``, from a tier slower than its number in ``beyond``. The keys need not be a chain.

        A server sends at most one byte more than ``max_bytes`` of an entry, so that the size check refuses it.
        """

    def find(self, keys: Sequence[bytes], *, beyond: int = -1) -> list[FoundEntry]:
        """Return the entries like ``get``, with their tiers. The first of ``keys`` must come from a tier slower than ``beyond``."""

    def accept(self, keys: Sequence[bytes], entries: Sequence[FoundEntry], now_ns: int) -> None:
        """Record the use of a chain whose last entries were found and checked, and copy them to faster tiers."""

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        """Return the bytes of one entry for inspection, or None, without recording a use.

        With ``front`` only the bytes before the payload of a kvpack file must be correct.
        """

    def peek_each(self, keys: Sequence[bytes], *, front: bool = False) -> list[Data | None]:
        """Return the result of ``peek`` for each of ``keys``; the caller bounds their bytes."""

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        """Store the last entry of ``chain``, in use since ``now_ns``, unless it exists; return True if a readable entry exists now.

        Anything that is not an entry (``entry_kind.Kind.JUNK``) is replaced; an entry that another store may be able to read stays.
        """

    def put_all(self, chain: Sequence[bytes], entries: Mapping[int, Sequence[memoryview]], now_ns: int) -> list[bool]:
        """Store several entries of one chain in order, and return the result of ``put`` for each.

        ``entries`` are their pieces, by position in ``chain``. After an entry that is not stored no other is tried, so that a call waits
        for room once.
        """

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        """Record that ``chain``, starting with its first chunk, is in use."""

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        """Remove entries, last first, and return the keys that existed."""

    def discard(self, key: bytes, entry: FoundEntry) -> None:
        """Remove an entry with damaged bytes ``entry`` from the tier that it came from."""

    def list(self) -> Iterator[StoredEntry]:
        """Yield every entry, in any order."""

    def size(self) -> tuple[int, int]:
        """Return the number of entries and their total bytes."""

    def pin(self, keys: Sequence[bytes], hold: Hold) -> bool:
        """Protect a chain from eviction, in every process, until ``unpin`` or the end of the hold. Returns True if it is pinned now."""

    def unpin(self, keys: Sequence[bytes], owner: str | None = None) -> bool:
        """Undo ``pin`` of the same chain, by one owner or by all. Returns True if it was pinned."""

    def pins(self) -> Sequence[Pin]:
        """Return the pins in effect."""

    def pinned(self) -> set[bytes]:
        """Return the pinned keys."""

    def take_lease(self, key: bytes, seconds: float) -> Lease | None:
        """Acquire the lease of ``key`` for at most ``seconds`` (leases.py); return None while another holder has it.

        If no lease is possible, for example after a fault, the result is a lease that everyone gets.
        """

    def collect(self) -> None:
        """Remove unfinished files, count again, and evict entries above the budget."""

    def close(self) -> None:
        """Release connections; entries stay."""


class OneTier:
    """Common methods of backends with a single tier. Backends that query a server override those that work entry by entry."""

    @property
    def parts(self: Backend) -> Sequence[Backend]:
        """The backend itself."""
        return [self]

    def find(self: Backend, keys: Sequence[bytes], *, beyond: int = -1) -> list[FoundEntry]:
        """Implement ``Backend.find`` for a backend without a slower tier."""
        return [FoundEntry(data, 0) for data in self.get(keys)] if beyond < 0 else []

    def present_each(self: Backend, keys: Sequence[bytes]) -> list[bool]:
        """Implement ``Backend.present_each`` one key at a time."""
        return [self.present([key]) == 1 for key in keys]

    def find_each(self: Backend, keys: Sequence[bytes], beyond: Sequence[int], max_bytes: int) -> list[FoundEntry | None]:
        """Implement ``Backend.find_each`` one key at a time."""
        result = [self.find([key], beyond=tier) for key, tier in zip(keys, beyond, strict=True)]
        return [entries[0] if entries else None for entries in result]

    def peek_each(self: Backend, keys: Sequence[bytes], *, front: bool = False) -> list[Data | None]:
        """Implement ``Backend.peek_each`` one key at a time."""
        return [self.peek(key, front=front) for key in keys]

    def put_all(self: Backend, chain: Sequence[bytes], entries: Mapping[int, Sequence[memoryview]], now_ns: int) -> list[bool]:
        """Implement ``Backend.put_all`` one entry at a time."""
        stored = takewhile(bool, (self.put(chain[: position + 1], pieces, now_ns) for position, pieces in entries.items()))
        count = sum(stored)
        return [index < count for index in range(len(entries))]

    def pinned(self: Backend) -> set[bytes]:
        """Implement ``Backend.pinned`` with the pins in effect."""
        return {key for pin in self.pins() for key in pin.chain}

    def take_lease(self: Backend, key: bytes, seconds: float) -> Lease | None:
        """Implement ``Backend.take_lease`` for a backend that others cannot reach."""
        return NoLease()

    def accept(self: Backend, keys: Sequence[bytes], entries: Sequence[FoundEntry], now_ns: int) -> None:
        """Implement ``Backend.accept`` for a backend without a faster tier."""
        self.touch(keys, now_ns)
