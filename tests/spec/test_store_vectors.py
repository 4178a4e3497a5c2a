"""The vectors of store entries are unchanged and all listed, and the library returns the results in the manifest."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import xxhash

from kvpack.file import container
from kvpack.file.header import Contents
from kvpack.formats.errors import KvpackError, Undecryptable, UnsupportedVersion
from kvpack.store.encryption import Cipher, decrypt_entry
from kvpack.store.entries import check_entry, file_payload_digest, open_entry, payload_digest

pytest.importorskip("cryptography")

from spec.generate.store_vectors import FOLDER, MANIFEST, described, manifest, prefixed, vectors

LINES = manifest()


def test_vectors_were_not_changed_added_or_lost() -> None:
    assert {f"{name}.entry" for name in vectors()} == set(LINES)
    assert {path.name for path in FOLDER.iterdir()} == {*LINES, MANIFEST.name}
    for file, line in LINES.items():
        assert hashlib.sha256((FOLDER / file).read_bytes()).hexdigest() == line["sha256"], file
    for name, vector in vectors().items():
        assert LINES[f"{name}.entry"].items() >= described(vector).items(), name


def read(file: str, line: dict[str, Any]) -> bytes:
    """Read an entry's file as the manifest's ``line`` describes. Raises the library's errors."""
    key, data = bytes.fromhex(line["key"]), (FOLDER / file).read_bytes()
    keys = {name: bytes.fromhex(secret) for name, secret in line["encryption_keys"].items()}
    clear = bytes(decrypt_entry(key, data, Cipher(keys, line["tenant"]) if keys else None))
    opened = open_entry(clear, key)
    opened.verify()
    named = check_entry(opened, line.get("start"), None, None)
    if named.key != key:
        raise KvpackError("another key")
    if "file" in line:
        check_chunk(opened, named, line)
    return clear


def check_chunk(opened: container.File, named: Any, line: dict[str, Any]) -> None:
    names = {"model": "name"}
    given = {names.get(name, name): text for name, text in line["identity"].items() if name not in ("recipe", "tenant")}
    assert (dict(opened.header.model), opened.header.recipe) == (given, line["identity"]["recipe"])
    ids = b"".join(number.to_bytes(4, "little") for number in line["chunk_ids"])
    assert (named.ids, named.inputs) == (ids, b"")
    if "parent" in line:
        assert named.parent.hex() == line["parent"]
    else:
        assert named.parent == root(line["identity"])
    assert hashlib.sha256(prefixed(named.parent) + prefixed(ids)).hexdigest() == line["key"]


def root(identity: dict[str, str]) -> bytes:
    """Return the root of the keys for ``identity``, as defined in store.md, Keys."""
    fields = {"format": "1"} | {
        name: identity.get(name, "") for name in ("model", "recipe", "weights", "adapter", "rope", "dtype", "tenant", "config", "extra")
    }
    return hashlib.sha256(b"".join(prefixed(one.encode()) for pair in fields.items() for one in pair)).digest()


@pytest.mark.parametrize("file", LINES)
def test_the_library_reads_entries_or_treats_them_as_absent(file: str) -> None:
    line = LINES[file]
    if "file" in line:
        assert read(file, line) == (FOLDER / line["file"]).read_bytes()
        return
    with pytest.raises(KvpackError) as refused:
        read(file, line)
    if "damaged" in line:
        assert isinstance(refused.value, (Undecryptable, UnsupportedVersion)) != line["damaged"]


def test_a_payload_without_tensors_has_the_digest_of_an_empty_string() -> None:
    empty = Contents(codecs=(), layers=())
    data = container.to_bytes(empty, {})
    expected = payload_digest(empty, {})
    assert expected == xxhash.xxh3_128_digest(b"")
    assert file_payload_digest(container.open_bytes(data), memoryview(data)) == expected
