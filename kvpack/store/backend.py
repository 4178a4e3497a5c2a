"""The interface of a store's backend: bytes by key, any of which may vanish at any time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

Data = bytes | bytearray | memoryview
"""An entry's bytes: a mapped file where possible."""


MAX_ENTRY_BYTES = 512 * 2**20
"""The default limit for the bytes of one entry, and Redis' limit for one string; a larger entry is never read."""


@dataclass(frozen=True)
class Stored:
    """One entry of a listing: its key, its bytes, and when it was last used, in nanoseconds since 1970 (0: unknown)."""

    key: bytes
    size: int
    used_ns: int


@dataclass(frozen=True)
class Found:
    """An entry from a backend: its bytes, still unchecked, and the tier that they came from (0: the fastest)."""

    data: Data
    tier: int


class Backend(Protocol):
    """Entries by key. No method raises for a fault of the system or the server: it counts the fault and reports a miss.

    Keys come in the order of a chain, ancestors first. Anything larger than the limit for entries (forms.py) is never read
    and counts as missing.
    """

    @property
    def private(self) -> bool:
        """Whether only this user can have written what is read, so that digests alone are enough."""

    @property
    def puts_at_once(self) -> int:
        """The best number of concurrent puts: 1 if a put waits for no server."""

    @property
    def parts(self) -> Sequence[Backend]:
        """The backends of the tiers, the fastest first."""

    def present(self, keys: Sequence[bytes]) -> int:
        """The number of leading ``keys`` that are present as entries of the store's form."""

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        """The bytes of the entries of ``keys``, up to the first missing one."""

    def find(self, keys: Sequence[bytes], *, beyond: int = -1) -> list[Found]:
        """As ``get``, with the tier of each entry; the first of ``keys`` from a tier slower than ``beyond``."""

    def accept(self, keys: Sequence[bytes], found: Sequence[Found], now_ns: int) -> None:
        """Note the use of a chain whose last entries were found and then checked, and copy these to tiers faster than their own."""

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        """The bytes of one entry for inspection, or None; its use is not noted.

        With ``front`` only the bytes before the payload of a kvpack file must be correct.
        """

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        """Store the last entry of ``chain``, in use since ``now_ns``, unless it exists; return whether a readable entry exists now.

        Anything that is not an entry (``forms.Kind.JUNK``) is replaced; an entry that another store may read stays.
        """

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        """Note that ``chain``, from its first chunk on, is in use."""

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        """Remove entries, the last first, and return the keys that existed."""

    def discard(self, key: bytes, found: Found) -> None:
        """Remove an entry whose bytes ``found`` are damaged, from the tier that it was in."""

    def list(self) -> Iterator[Stored]:
        """Every entry, in no order."""

    def size(self) -> tuple[int, int]:
        """Entries and their bytes."""

    def pin(self, keys: Sequence[bytes]) -> bool:
        """Protect a chain from eviction, in every process, until ``unpin``. Returns whether it is pinned now."""

    def unpin(self, keys: Sequence[bytes]) -> bool:
        """Undo ``pin`` of the same chain. Returns whether it was pinned."""

    def pinned(self) -> set[bytes]:
        """The pinned keys."""

    def collect(self) -> None:
        """Remove unfinished files, count again, and evict entries above the budget."""

    def close(self) -> None:
        """Release connections; the entries stay."""


class OneTier:
    """``parts``, ``find`` and ``accept`` for a backend with a single tier."""

    @property
    def parts(self: Backend) -> Sequence[Backend]:
        """The backend itself."""
        return [self]

    def find(self: Backend, keys: Sequence[bytes], *, beyond: int = -1) -> list[Found]:
        """``Backend.find`` for a backend without a slower tier."""
        return [Found(data, 0) for data in self.get(keys)] if beyond < 0 else []

    def accept(self: Backend, keys: Sequence[bytes], found: Sequence[Found], now_ns: int) -> None:
        """``Backend.accept`` for a backend without a faster tier."""
        self.touch(keys, now_ns)
