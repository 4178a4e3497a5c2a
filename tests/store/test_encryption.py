"""Only a store with the key can read encrypted entries, and no entry can be changed or moved to another key."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import pytest
import xxhash

import kvpack
from kvpack.formats.errors import InvalidParameter, KvpackError, Undecryptable
from kvpack.store.encryption import MAGIC, Cipher
from support.store_caches import CHUNK, IDENTITY, entries, entry_of, is_same_prefix, open_store, prompt, save

pytest.importorskip("cryptography")

if TYPE_CHECKING:
    from pathlib import Path

OLD, NEW = bytes(range(32)), bytes(range(16))


def test_encrypted_entries_are_loaded_only_with_the_key(tmp_path: Path) -> None:
    ids = prompt(3)
    store = open_store(tmp_path, encryption={"old": OLD})
    whole = save(store, ids)
    assert is_same_prefix(open_store(tmp_path, encryption={"old": OLD}).load(ids)[1], whole)
    for other in ({"old": NEW}, {"other": OLD}, {"old": bytes(32)}):
        wrong = open_store(tmp_path, encryption=other)
        assert wrong.load(ids) == (0, None)
        assert wrong.counters()["undecryptable_entries"] == 1
        assert wrong.counters()["damaged_entries"] == 0
    assert store.load(ids)[0] == 3 * CHUNK, "an entry of another key was removed"


def test_nothing_in_an_entry_is_readable_without_the_key(tmp_path: Path) -> None:
    store = open_store(tmp_path, encryption={"k": OLD})
    save(store, prompt(1))
    (path,) = entries(tmp_path)
    with open(path, "rb") as file:
        data = file.read()
    assert data.startswith(MAGIC + bytes([1]) + b"k")
    assert not any(word in data for word in (b"kivi", b"model", b"safetensors", b"codes", bytes(64)))
    before = data
    store.delete(prompt(1))
    save(store, prompt(1))
    with open(path, "rb") as file:
        assert file.read()[-64:] != before[-64:], "a nonce was reused"


def test_encryption_keys_can_be_rotated(tmp_path: Path) -> None:
    ids, more = prompt(2, seed=1), prompt(2, seed=2)
    save(open_store(tmp_path, encryption={"old": OLD}), ids)
    both = open_store(tmp_path, encryption={"new": NEW, "old": OLD})
    save(both, more)
    assert both.load(ids)[0] == both.load(more)[0] == 2 * CHUNK
    after = open_store(tmp_path, encryption={"new": NEW})
    assert (after.load(ids)[0], after.load(more)[0]) == (0, 2 * CHUNK)


def test_an_entry_cannot_replace_another(tmp_path: Path) -> None:
    store = open_store(tmp_path, encryption={"k": OLD})
    ids, others = prompt(2), prompt(2, seed=5)
    save(store, ids)
    save(store, others, seed=1)
    os.replace(entry_of(store, others, 1), entry_of(store, ids, 1))
    assert store.load(ids)[0] == CHUNK
    assert store.counters()["undecryptable_entries"] == 1
    cipher = Cipher({"k": OLD}, "one")
    sealed = b"".join(cipher.encrypt(bytes(32), [memoryview(b"text")]))
    assert cipher.decrypt(bytes(32), sealed) == b"text"
    for key, tenant in ((bytes(31) + b"1", "one"), (bytes(32), "two")):
        with pytest.raises(Undecryptable, match="tag does not match"):
            Cipher({"k": OLD}, tenant).decrypt(key, sealed)


def test_unreadable_entries_after_a_gap_are_not_reported_as_stored(tmp_path: Path) -> None:
    store = open_store(tmp_path, encryption={"k": OLD})
    ids, others = prompt(3), prompt(2, seed=5)
    whole = save(store, ids)
    save(store, others, seed=1)
    os.replace(entry_of(store, others, 1), entry_of(store, ids, 1))
    os.unlink(entry_of(store, ids, 0))
    fresh = open_store(tmp_path, encryption={"k": OLD})
    assert fresh.save(ids, whole) == fresh.load(ids)[0] == CHUNK
    assert len(entries(tmp_path)) == 4, "an entry that another key may decrypt was removed"
    # What is damaged beyond a gap is made anew.
    with open(entry_of(store, ids, 1), "r+b") as file:
        file.write(b"x")
    os.unlink(entry_of(store, ids, 0))
    assert is_same_prefix(save_again(open_store(tmp_path, encryption={"k": OLD}), ids, whole), whole)


def save_again(store: kvpack.Store, ids: list[int], whole: kvpack.Cache) -> kvpack.Cache | None:
    assert store.save(ids, whole) == 3 * CHUNK
    return store.load(ids)[1]


def test_every_byte_is_authenticated() -> None:
    cipher = Cipher({"k": OLD}, "tenant")
    sealed = bytearray(b"".join(cipher.encrypt(bytes(32), [memoryview(b"some"), memoryview(b"text")])))
    for forged in (False, True):
        for place in range(len(sealed) - (16 if forged else 0)):
            bad = bytearray(sealed)
            bad[place] ^= 1 << place % 8
            if forged:
                bad[-16:] = xxhash.xxh3_128_digest(bytes(bad[:-16]))
            with pytest.raises(KvpackError):
                cipher.decrypt(bytes(32), bytes(bad))
    for length in range(len(sealed)):
        with pytest.raises(KvpackError):
            cipher.decrypt(bytes(32), bytes(sealed[:length]))


def test_a_damaged_entry_is_replaced_and_a_plain_one_is_a_miss(tmp_path: Path) -> None:
    ids = prompt(2)
    store = open_store(tmp_path, encryption={"k": OLD})
    whole = save(store, ids)
    with open(entry_of(store, ids, 1), "r+b") as file:
        file.seek(500)
        file.write(b"damage")
    assert store.load(ids)[0] == CHUNK
    assert store.counters()["damaged_entries"] == 1
    assert store.save(ids, whole) == 2 * CHUNK
    assert store.load(ids)[0] == 2 * CHUNK
    plain = open_store(tmp_path / "plain")
    save(plain, ids)
    sealing = open_store(tmp_path / "plain", encryption={"k": OLD})
    assert sealing.load(ids) == (0, None)
    assert sealing.counters()["damaged_entries"] == 1
    assert sealing.save(ids, whole) == 2 * CHUNK
    seen = open_store(tmp_path)
    assert seen.load(ids) == (0, None)
    assert (seen.counters()["undecryptable_entries"], seen.counters()["damaged_entries"]) == (1, 0)
    assert store.load(ids)[0] == 2 * CHUNK, "an encrypted entry was reported as damage without a key"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "expected at least one key"),
        ({"k": b"short"}, "has 5 bytes, expected 16, 24 or 32"),
        ({"k": "text"}, "is of type str"),
        ({"": OLD}, "the id of an encryption key is ''"),
        ({"x" * 256: OLD}, "expected 1 to 255 bytes"),
        ({7: OLD}, "the id of an encryption key is 7"),
    ],
)
def test_invalid_keys_are_refused(keys: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=message):
        open_store(tmp_path, encryption=keys)


def test_tenants_with_one_key_are_separate(tmp_path: Path) -> None:
    ids = prompt(2)
    save(open_store(tmp_path, encryption={"k": OLD}), ids)
    other = kvpack.Store(tmp_path, dataclasses.replace(IDENTITY, tenant="other"), chunk=CHUNK, encryption={"k": OLD})
    assert other.load(ids) == (0, None)
    assert other.counters()["undecryptable_entries"] == 0
