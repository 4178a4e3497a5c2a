"""A third-party backend needs one class and one row in the table of kinds, as CONTRIBUTING.md describes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack.formats.errors import InvalidParameter
from kvpack.store import locations
from kvpack.store.backend import SingleTierBackend, StoredEntry
from support.store_caches import CHUNK, IDENTITY, is_same_prefix, prompt, save

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvpack.store.backend import Data, FoundEntry, Pin, PinTerms
    from kvpack.store.counters import Counters
    from kvpack.store.entry_kind import EntryFormat


class Toy(SingleTierBackend):
    """Entries in a dict that all stores with the same name share. Nothing is evicted."""

    is_private = True
    shelves: dict[str, dict[bytes, bytes]] = {}  # noqa: RUF012

    def __init__(self, name: str, counters: Counters) -> None:
        self._entries, self._counters = self.shelves.setdefault(name, {}), counters

    def count_present(self, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self._entries), len(keys))

    def get(self, keys: Sequence[bytes]) -> list[Data]:
        return [bytearray(self._entries[key]) for key in keys[: self.count_present(keys)]]

    def peek(self, key: bytes, *, front: bool = False) -> Data | None:
        return self._entries.get(key)

    def put(self, chain: Sequence[bytes], pieces: Sequence[memoryview], now_ns: int) -> bool:
        data = b"".join(pieces)
        if chain[-1] not in self._entries:
            self._counters.add("saved_chunks")
            self._counters.add("saved_bytes", len(data))
        self._entries.setdefault(chain[-1], data)
        return True

    def touch(self, chain: Sequence[bytes], now_ns: int) -> None:
        pass

    def delete(self, keys: Sequence[bytes]) -> set[bytes]:
        return {key for key in keys if self._entries.pop(key, None) is not None}

    def discard(self, key: bytes, found: FoundEntry) -> None:
        self.delete([key])

    def list(self) -> Iterator[StoredEntry]:
        return iter([StoredEntry(key, len(data), 0) for key, data in self._entries.items()])

    def size(self) -> tuple[int, int]:
        return len(self._entries), sum(map(len, self._entries.values()))

    def pin(self, keys: Sequence[bytes], terms: PinTerms) -> bool:
        return False

    def unpin(self, keys: Sequence[bytes], owner: str | None = None) -> bool:
        return False

    def pins(self) -> Sequence[Pin]:
        return []

    def collect(self) -> None:
        pass

    def close(self) -> None:
        pass


def _open(location: str, counters: Counters, form: EntryFormat) -> Toy:
    return Toy(location, counters)


@pytest.fixture(autouse=True)
def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the row of a new backend to the table of kinds."""
    row = locations.LocationKind("a toy", set(), ("toy://",), lambda location: str(location).startswith("toy://"), _open)
    monkeypatch.setattr(locations, "KINDS", [*locations.KINDS, row])
    monkeypatch.setattr(Toy, "shelves", {})


def test_saved_entries_are_loaded_by_another_store() -> None:
    ids = prompt(3)
    with kvpack.Store("toy://shelf", IDENTITY, chunk=CHUNK) as store:
        whole = save(store, ids)
    with kvpack.Store("toy://shelf", IDENTITY, chunk=CHUNK) as other:
        found, loaded = other.load(ids)
        assert found == 3 * CHUNK
        assert is_same_prefix(loaded, whole)
        assert other.stats()["entries"] == 3
    with kvpack.Store("toy://another", IDENTITY, chunk=CHUNK) as another:
        assert another.load(ids) == (0, None)


def test_damage_is_a_miss() -> None:
    ids = prompt(3)
    with kvpack.Store("toy://shelf", IDENTITY, chunk=CHUNK) as store:
        save(store, ids)
        (shelf,) = Toy.shelves.values()
        first = next(iter(shelf))
        shelf[first] = shelf[first][:-1] + bytes([shelf[first][-1] ^ 1])
        assert store.load(ids) == (0, None)
        assert first not in shelf


def test_a_new_backend_can_be_a_tier_without_options_of_other_backends(tmp_path: Path) -> None:
    ids = prompt(3)
    with kvpack.Store(["toy://shelf", tmp_path], IDENTITY, chunk=CHUNK) as store:
        save(store, ids)
        assert store.load(ids)[0] == 3 * CHUNK
    for options in ({"ttl": 5}, {"max_bytes": 5}):
        given: dict[str, Any] = options
        with pytest.raises(InvalidParameter, match="a toy has no option"):
            kvpack.Store("toy://shelf", IDENTITY, chunk=CHUNK, **given)
    with pytest.raises(InvalidParameter, match=r"expected one of redis://.*toy://"):
        kvpack.Store("toys://shelf", IDENTITY, chunk=CHUNK)
