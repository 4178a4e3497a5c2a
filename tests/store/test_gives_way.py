"""In a store with encryption keys, invalid entries are replaced at once or after a load.

Entries that others may be able to read stay.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpack.store.entry_kind import MAGIC
from support.store_caches import CHUNK, KEYS, OTHER_KEYS, entry_of, is_same_prefix, open_store, prompt, save

pytest.importorskip("cryptography")

# What replaces an entry, given the entry and the same one that is not encrypted.
BAD = {
    "zeros": lambda good, plain: bytes(len(good)),
    "empty": lambda good, plain: b"",
    "junk": lambda good, plain: b"junk",
    "magic alone": lambda good, plain: MAGIC + b"\1k",
    "plaintext": lambda good, plain: plain,
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("looks_first", [False, True])
def test_entries_that_are_not_encrypted_are_replaced(bad: str, looks_first: bool, plain_entry: bytes, tmp_path: Path) -> None:
    store, ids = open_store(tmp_path / "store", encryption=KEYS), prompt(3)
    whole = save(store, ids)
    path = Path(entry_of(store, ids, 1))
    path.write_bytes(BAD[bad](path.read_bytes(), plain_entry))
    if looks_first:
        assert store.load(ids)[0] == CHUNK
    else:
        assert store.match(ids) == CHUNK
    assert store.save(ids, whole) == 3 * CHUNK
    n, found = store.load(ids)
    assert n == 3 * CHUNK, "save said so"
    assert is_same_prefix(found, whole)


def test_entries_of_another_key_are_kept_and_not_reported_as_stored(tmp_path: Path) -> None:
    ids = prompt(3)
    theirs = open_store(tmp_path / "store", encryption=OTHER_KEYS)
    whole = save(theirs, ids)
    for ours in (open_store(tmp_path / "store", encryption=KEYS), open_store(tmp_path / "store")):
        assert ours.load(ids) == (0, None)
        assert ours.save(ids, whole) == ours.match(ids) == 0
        assert ours.counters()["refused_chunks"] == 1
        assert ours.counters()["damaged_entries"] == 0
    assert is_same_prefix(theirs.load(ids)[1], whole)


def test_entries_of_a_later_encryption_version_are_kept(tmp_path: Path) -> None:
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
