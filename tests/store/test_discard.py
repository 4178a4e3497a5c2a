"""A store removes entries whose bytes are damaged, and no other entries that it cannot read."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack.formats import errors
from kvpack.store.entry_kind import means_damage
from support.file_parts import edit
from support.parts import Parts
from support.store_caches import CHUNK, entry_of, is_same_prefix, open_store, prompt, save

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DAMAGE = {"DigestMismatch", "InvalidHeader", "InvalidPayload", "NotKvpack", "Truncated", "NotConsecutive"}


def test_only_damaged_bytes_count_as_damage() -> None:
    classes = [found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, kvpack.KvpackError)]
    assert {found.__name__ for found in classes if means_damage(found("text"))} == DAMAGE
    assert not any(map(means_damage, [MemoryError(), OSError(errno.EIO, "text"), ValueError("text"), KvpackErrorOfALaterVersion("text")]))


class KvpackErrorOfALaterVersion(kvpack.KvpackError):
    """An error class that the policy does not list."""


REFUSALS = [
    MemoryError(),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    errors.LimitExceeded("more than max_bytes"),
    errors.UnknownCodec("codec of a later version"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=repr)
@pytest.mark.parametrize("step", ["read", "concat"])
def test_entries_are_kept_if_the_reader_lacks_something(
    step: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, ids = open_store(tmp_path), prompt(3)
    whole = save(store, ids)

    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("kvpack.store.entries.EntryReader._read_one" if step == "read" else "kvpack.cache.cache.concat", refuse)
        assert store.load(ids) == (0, None)
    assert store.counters()["unreadable_entries"] == 1
    assert store.counters()["damaged_entries"] == 0
    assert is_same_prefix(store.load(ids)[1], whole)


def test_an_incomplete_read_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that another user truncates during a read was not read completely, so the store cannot call it damaged."""
    store, ids = open_store(tmp_path), prompt(2)
    whole = save(store, ids)
    monkeypatch.setattr("kvpack.store.trust.Trust.is_private", False)
    real = os.preadv
    with monkeypatch.context() as patch:
        patch.setattr("kvpack.store.trust.os.preadv", lambda fd, views, at: 0 if at else real(fd, [views[0][:100]], at))
        assert store.load(ids) == (0, None)
    assert store.counters()["faults"] == {"get EIO": 1}
    assert store.counters()["damaged_entries"] == 0
    assert is_same_prefix(store.load(ids)[1], whole)


def _of_a_later_version(data: bytes) -> bytes:
    parts = Parts.of(data)
    edit("required", ["of-a-later-version"])(parts)
    return parts.joined()


def _of_another_codec(data: bytes) -> bytes:
    parts = Parts.of(data)
    edit("codecs.0.id", "of-a-later-version")(parts)
    return parts.joined()


@pytest.mark.parametrize("change", [_of_a_later_version, _of_another_codec])
def test_an_entry_of_a_later_version_is_kept(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    store, ids = open_store(tmp_path), prompt(3)
    whole = save(store, ids)
    path = entry_of(store, ids, 1)
    with open(path, "rb") as file:
        later = change(file.read())
    with open(path, "wb") as file:
        file.write(later)
    n, found = store.load(ids)
    assert n == CHUNK
    assert is_same_prefix(found, whole)
    assert store.counters()["unreadable_entries"] == 1
    assert store.counters()["damaged_entries"] == 0
    with open(path, "rb") as file:
        assert file.read() == later


def test_an_encrypted_entry_is_kept_if_no_key_is_given(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    secret, ids = open_store(tmp_path, encryption={"k": bytes(32)}), prompt(2)
    save(secret, ids)
    plain = open_store(tmp_path)
    assert plain.load(ids) == (0, None)
    assert plain.counters()["undecryptable_entries"] == 1
    assert plain.counters()["damaged_entries"] == 0
    assert secret.load(ids)[0] == 2 * CHUNK
