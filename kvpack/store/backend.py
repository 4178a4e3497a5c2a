"""The interface of what holds a store's entries: bytes by key, of which any may vanish at any time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

Data = bytes | bytearray | memoryview
"""An entry's bytes: a mapped file where there is one."""


MAX_ENTRY_BYTES = 512 * 2**20
"""The most bytes of one entry, unless the store says otherwise, and what Redis holds as one string; a larger one is never read."""


@dataclass(frozen=True)
class Stored:
    """One entry of a listing: its key, its bytes, and when it was last used, in nanoseconds since 1970 (0: unknown)."""

    key: bytes
    size: int
    used_ns: int


@dataclass(frozen=True)
class Found:
    """An entry as a backend had it: its bytes, which nobody has checked yet, and the tier that they came from, 0 for the fastest."""

    data: Data
    tier: int


class Backend(Protocol):
    """Entries by key. No method raises for a fault of the system or the server: it counts the fault, and is a miss.

    Keys come in the order of a chain, an ancestor before what follows it. What is larger than an entry may be (forms.py) is
    never read: it is not there.
    """

    @property
    def private(self) -> bool:
        """Whether only this user can have written what is read, so that digests alone are enough."""

    @property
    def puts_at_once(self) -> int:
        """How many entries are best put at once: 1 where a put waits for nobody."""

    def present(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys`` are there, as entries of the store's form, up to the first that is not."""

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        """The bytes of ``keys``, up to the first that is not there."""

    def find(self, keys: Sequence[bytes], *, beyond: int = -1) -> list[Found]:
        """As ``get``, with the tier of each entry; the first of ``keys`` from a tier slower than ``beyond``."""

    def accept(self, keys: Sequence[bytes], found: Sequence[Found], now_ns: int) -> None:
        """Note that a whole chain, found so and checked since, is in use, and copy it to the tiers faster than those it was in."""

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        """The bytes of one entry, or None, without noting its use: to look at.

        With ``front`` only what is before the payload of a kvpack file need be right.
        """

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        """Store the last entry of ``chain``, in use since ``now_ns``, unless there is one; whether one that can be read is there now.

        What is no entry (``forms.Kind.JUNK``) gives way to it; what another store may read stays.
        """

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        """Note that ``chain``, from its first chunk on, is in use."""

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        """Remove entries, the last first, and return those that there were."""

    def discard(self, key: bytes, found: Found) -> None:
        """Remove an entry whose bytes ``found`` are damaged, from the tier that it was in."""

    def list(self) -> Iterator[Stored]:
        """Every entry, in no order."""

    def size(self) -> tuple[int, int]:
        """Entries and their bytes."""

    def pin(self, keys: Sequence[bytes]) -> bool:
        """Keep a chain from eviction until ``unpin``, in every process. Whether it is pinned now."""

    def unpin(self, keys: Sequence[bytes]) -> bool:
        """Undo ``pin`` of the same chain. Whether it was pinned."""

    def pinned(self) -> set[bytes]:
        """The keys that are pinned."""

    def collect(self) -> None:
        """Remove unfinished files, count afresh, and evict what is above the budget."""

    def close(self) -> None:
        """Give back connections; the entries stay."""


class OneTier:
    """What a backend that is no list of tiers makes of ``find`` and ``accept``."""

    def find(self: Backend, keys: Sequence[bytes], *, beyond: int = -1) -> list[Found]:
        """As the protocol has it: there is no slower tier."""
        return [Found(data, 0) for data in self.get(keys)] if beyond < 0 else []

    def accept(self: Backend, keys: Sequence[bytes], found: Sequence[Found], now_ns: int) -> None:
        """As the protocol has it: there is no faster tier."""
        self.touch(keys, now_ns)
