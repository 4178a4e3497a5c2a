"""What is no entry of a store with keys gives way to one, at once or after a load; what another store may read stays."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvpack.store.forms import MAGIC

from store_caches import CHUNK, entry_of, open_store, prompt, same, save  # isort: skip

pytest.importorskip("cryptography")

if TYPE_CHECKING:
    from collections.abc import Callable

KEYS = {"k": bytes(range(32))}
OTHERS = {"other": bytes(32)}
PLAIN: list[bytes] = []


@pytest.fixture(autouse=True)
def plain(tmp_path: Path) -> None:
    """An entry that is not encrypted, of the second chunk of the first prompt."""
    store, ids = open_store(tmp_path / "plain"), prompt(3)
    save(store, ids)
    PLAIN[:] = [Path(entry_of(store, ids, 1)).read_bytes()]


def zeros(good: bytes) -> bytes:
    return bytes(len(good))


def empty(good: bytes) -> bytes:
    return b""


def junk(good: bytes) -> bytes:
    return b"junk"


def magic_alone(good: bytes) -> bytes:
    return MAGIC + b"\1k"


def plaintext(good: bytes) -> bytes:
    return PLAIN[0]


@pytest.mark.parametrize("bad", [zeros, empty, junk, magic_alone, plaintext])
@pytest.mark.parametrize("looks_first", [False, True])
def test_what_is_no_encrypted_entry_gives_way(bad: Callable[[bytes], bytes], looks_first: bool, tmp_path: Path) -> None:
    store, ids = open_store(tmp_path / "store", encryption=KEYS), prompt(3)
    whole = save(store, ids)
    path = Path(entry_of(store, ids, 1))
    path.write_bytes(bad(path.read_bytes()))
    if looks_first:
        assert store.load(ids)[0] == CHUNK
    else:
        assert store.match(ids) == CHUNK
    assert store.save(ids, whole) == 3 * CHUNK
    n, found = store.load(ids)
    assert n == 3 * CHUNK, "save said so"
    assert same(found, whole)


def test_what_another_key_opens_stays_and_is_not_called_stored(tmp_path: Path) -> None:
    ids = prompt(3)
    theirs = open_store(tmp_path / "store", encryption=OTHERS)
    whole = save(theirs, ids)
    for ours in (open_store(tmp_path / "store", encryption=KEYS), open_store(tmp_path / "store")):
        assert ours.load(ids) == (0, None)
        assert ours.save(ids, whole) == ours.match(ids) == 0
        assert ours.counters()["refused_chunks"] == 1
        assert ours.counters()["damaged_entries"] == 0
    assert same(theirs.load(ids)[1], whole)


def test_a_later_version_of_the_encryption_stays(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path / "store", encryption=KEYS), prompt(2)
    whole = save(store, ids)
    path = Path(entry_of(store, ids, 0))
    later = path.read_bytes().replace(b"kvpack-encrypted 1\n", b"kvpack-encrypted 2\n")
    path.write_bytes(later)
    for opened in (store, open_store(tmp_path / "store")):
        assert opened.load(ids) == (0, None)
        assert opened.counters()["faults"]["load UnsupportedVersion"] == 1
        assert opened.save(ids, whole) == 0
    assert path.read_bytes() == later
