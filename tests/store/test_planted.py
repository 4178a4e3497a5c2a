"""Entries planted by someone who may write to the location are never returned.

None of them hides a good entry for long or takes much memory.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import kvpack
from kvpack import cli
from kvpack.file import container
from kvpack.formats.errors import InvalidParameter
from kvpack.store.encryption import Cipher
from kvpack.store.entries import FEATURE, to_pieces
from kvpack.store.entry_kind import MAGIC, EntryFormat, EntryKind, encrypted_bytes
from kvpack.store.keys import chunk_links, token_bytes
from support import warm_python
from support.store_caches import CHUNK, IDENTITY, KEYS, OTHER_KEYS, cache, entry_of, is_same_prefix, open_store, prompt, save

pytest.importorskip("cryptography")

(KEY,) = KEYS.values()

IN_A_CHILD = """
import json, os, resource, sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from kvpack import cli
from support.store_caches import IDENTITY, cache, entry_of, open_store, prompt
folder, keys, name = os.path.join(sys.argv[1], "store"), os.path.join(sys.argv[1], "keys"), sys.argv[3]
ids = prompt(3)
store = open_store(folder, **({"encryption": {"k": bytes(range(32))}} if name == "encrypted" else {}))
store.save(ids, cache(len(ids)))
with open(entry_of(store, ids, 1), "r+b") as file:
    file.truncate(0)
    file.truncate(2 * 2**30)
with open(entry_of(store, ids, 2), "r+b") as file:
    file.truncate(2 * 2**30)
words = ["--key-file", keys, "--tenant", "tenant"] if name == "encrypted" else []
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = store.load(ids)[0], store.match(ids)
codes = [cli.main(["store", action, folder, *words]) for action in ("ls", "verify", "stat")]
codes.append(cli.main(["store", "export", folder, store.keys(ids)[2].hex(), os.path.join(sys.argv[1], "out"), *words]))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([found, codes, grown, store.counters()["faults"], os.path.exists(os.path.join(sys.argv[1], "out"))]))
"""


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"k {KEY.hex()}\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("name", ["encrypted", "plain"])
def test_an_entry_of_2_gib_uses_no_memory(name: str, key_file: Path, tmp_path: Path) -> None:
    words = [warm_python.python(), "-c", IN_A_CHILD, str(tmp_path), str(Path(__file__).parents[1]), name]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, codes, grown, faults, exported = json.loads(done.stdout.splitlines()[-1])
    assert found[0] == CHUNK
    assert codes[1:] == [1, 0, 1]
    assert not exported
    assert faults == {"get LimitExceeded": 1}
    assert grown < 100 * 1024, f"{grown} KiB more were needed"
    assert done.stderr.count("max_entry_bytes is 536870912") >= 2


def test_an_entry_above_the_size_limit_is_neither_read_nor_saved(tmp_path: Path) -> None:
    ids = prompt(3)
    whole = save(open_store(tmp_path / "store"), ids)
    size = os.stat(entry_of(open_store(tmp_path / "store"), ids, 0)).st_size
    small = open_store(tmp_path / "store", max_entry_bytes=size - 1)
    assert small.load(ids) == (0, None)
    assert small.counters()["faults"] == {"get LimitExceeded": 1}
    more = prompt(2, seed=4)
    assert small.save(more, cache(len(more))) == 0
    assert small.counters()["faults"]["encode LimitExceeded"] == 1
    assert is_same_prefix(open_store(tmp_path / "store", max_entry_bytes=size).load(ids)[1], whole), (
        "a smaller limit of the caller removed an entry"
    )
    for bad in (0, -1, 1.5, "1"):
        with pytest.raises(InvalidParameter, match="max_entry_bytes is"):
            open_store(tmp_path / "store", max_entry_bytes=bad)


MEMORY = """
import json, os, resource, sys
sys.path.insert(0, sys.argv[1])
import kvpack
from kvpack.store.encryption import Cipher
cipher, size, key = Cipher({"k": bytes(32)}, ""), 2**26, bytes(32)
plain = [memoryview(bytes(size))]
sealed = b"".join(cipher.encrypt(key, plain))
raised = []
used = 4096 * int(open("/proc/self/statm").read().split()[0])
for step in range(0, 20):
    resource.setrlimit(resource.RLIMIT_AS, (used + step * 2**23, resource.RLIM_INFINITY))
    for call in (lambda: cipher.encrypt(key, plain), lambda: cipher.decrypt(key, sealed)):
        try:
            done = call()
        except BaseException as error:
            raised.append(type(error).__name__)
        else:
            raised.append("")
            del done
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(json.dumps(raised))
"""


@pytest.mark.scenario
def test_exhausted_memory_does_not_abort_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY, str(Path(__file__).parents[1])], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == {"MemoryError", ""}, done.stderr
    assert "panicked" not in done.stderr


def test_entries_with_damaged_contents_are_removed_by_the_next_load(tmp_path: Path) -> None:
    store, ids = open_store(tmp_path / "store", encryption=KEYS), prompt(3)
    whole = save(store, ids)
    path = Path(entry_of(store, ids, 1))
    good = path.read_bytes()
    # One byte is changed by its own value: what is encrypted may hold any byte already.
    for bad in (good[:-1], good[: len(good) // 2], good[:200] + bytes([good[200] ^ 1]) + good[201:], good + b"x"):
        path.write_bytes(bad)
        assert store.load(ids)[0] == CHUNK
        assert store.save(ids, whole) == 3 * CHUNK
        assert store.load(ids)[0] == 3 * CHUNK


def run(*words: Any, code: int) -> None:
    assert cli.main(["store", *map(str, words)]) == code


def printed(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> Any:
    capsys.readouterr()
    run(*words, "--json", code=code)
    return json.loads(capsys.readouterr().out)


def test_commands_with_keys_refuse_unencrypted_entries(
    key_file: Path, plain_entry: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ids = tmp_path / "store", prompt(3)
    store = open_store(folder, encryption=KEYS)
    whole = save(store, ids)
    path = Path(entry_of(store, ids, 1))
    sealed = path.read_bytes()
    path.write_bytes(plain_entry)
    key = store.keys(ids)[1].hex()
    words = ["--key-file", key_file, "--tenant", IDENTITY.tenant]
    found = printed(capsys, "ls", folder, *words)
    assert [row["tokens"] for row in found["prefixes"]] == [CHUNK, CHUNK], "the chunks before and after it were not loaded"
    assert list(found["unreadable"]) == [key]
    assert "is not encrypted" in found["unreadable"][key]
    assert found["undecryptable"] == []
    run("ls", folder, *words, code=0)
    assert "1 entry refused as damaged, not encrypted or too large" in capsys.readouterr().out
    found = printed(capsys, "verify", folder, *words, code=1)
    assert [(row["key"], row["deleted"]) for row in found["refused"]] == [(key, False)]
    assert printed(capsys, "stat", folder, *words)["unreadable"] == 1
    run("export", folder, key, tmp_path / "out", *words, code=1)
    assert "is not encrypted" in capsys.readouterr().err
    run("export", folder, store.keys(ids)[2].hex(), tmp_path / "out", *words, code=2)
    assert not (tmp_path / "out").exists()
    # Without keys nobody can say that all should be encrypted: it is told.
    found = printed(capsys, "ls", folder)
    assert [row["key"] for row in found["prefixes"]] == [key]
    assert len(found["undecryptable"]) == 2
    run("ls", folder, code=0)
    said = capsys.readouterr().out
    assert "2 encrypted entries not readable without keys: pass --key-file" in said
    assert "stores with keys refuse them" in said
    # What a key of another id encrypted is not damage to any reader.
    path.write_bytes(b"".join(Cipher(OTHER_KEYS, IDENTITY.tenant).encrypt(store.keys(ids)[1], [memoryview(plain_entry)])))
    found = printed(capsys, "verify", folder, *words, "--delete")
    assert (found["undecryptable"], found["refused"]) == ([key], [])
    path.write_bytes(plain_entry)
    found = printed(capsys, "verify", folder, *words, "--delete", code=1)
    assert found["refused"][0]["deleted"]
    path.write_bytes(sealed)
    assert printed(capsys, "verify", folder, *words) == {"entries": 3, "refused": [], "undecryptable": []}
    assert is_same_prefix(store.load(ids)[1], whole)


def test_entries_planted_under_another_name_are_not_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, ids = open_store(tmp_path / "store"), prompt(2)
    save(store, ids)
    first, second = (Path(entry_of(store, ids, number)) for number in range(2))
    second.write_bytes(first.read_bytes())
    found = printed(capsys, "ls", tmp_path / "store")
    assert [row["tokens"] for row in found["prefixes"]] == [CHUNK]
    assert "its header names the key" in found["unreadable"][store.keys(ids)[1].hex()]


@pytest.mark.parametrize(
    ("form", "beginning", "size", "kind"),
    [
        (EntryFormat(), b"\0" * 8 + b'{"__metadata__":{"format":"kvpack","kvpack":"1 ', 5000, EntryKind.READABLE),
        (EntryFormat(), b"\0" * 8 + b'{"__metadata__":{"format":"kvpack","kvpack":"7 ', 5000, EntryKind.READABLE),
        (EntryFormat(), bytes(512), 5000, EntryKind.JUNK),
        (EntryFormat(), b"", 0, EntryKind.JUNK),
        (EntryFormat(max_bytes=4999), b"\0" * 8 + b'{"__metadata__":{"format":"kvpack","kvpack":"1 ', 5000, EntryKind.JUNK),
        (EntryFormat(), MAGIC + b"\1k", 5000, EntryKind.FOREIGN),
        (EntryFormat(), b"kvpack-encrypted 12\n", 5000, EntryKind.FOREIGN),
        (EntryFormat(), b"kvpack-encrypted 0\n", 5000, EntryKind.JUNK),
        (EntryFormat(key_ids=frozenset({b"k"})), MAGIC + b"\1k", 5000, EntryKind.READABLE),
        (EntryFormat(key_ids=frozenset({b"k"})), MAGIC + b"\1k", encrypted_bytes(b"k", 0), EntryKind.READABLE),
        (EntryFormat(key_ids=frozenset({b"k"})), MAGIC + b"\1k", encrypted_bytes(b"k", 0) - 1, EntryKind.JUNK),
        (EntryFormat(key_ids=frozenset({b"k"})), MAGIC + b"\2k", 21, EntryKind.JUNK),
        (EntryFormat(key_ids=frozenset({b"k"})), MAGIC, 5000, EntryKind.JUNK),
        (EntryFormat(key_ids=frozenset({b"k"})), MAGIC + b"\1l", 5000, EntryKind.FOREIGN),
        (EntryFormat(key_ids=frozenset({b"k"})), b"\0" * 8 + b'{"__metadata__":{"format":"kvpack","kvpack":"1 ', 5000, EntryKind.JUNK),
    ],
    ids=str,
)
def test_the_form_of_an_entry_is_recognized_by_its_beginning_and_size(
    form: EntryFormat, beginning: bytes, size: int, kind: EntryKind
) -> None:
    assert form.kind(beginning, size) is kind


@pytest.mark.parametrize("name", ["a\nb", "\ufeffk", "a\0", "\ud800", "a\tb"])
def test_ids_that_nobody_could_read_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="bytes of printable text"):
        kvpack.Store(tmp_path, IDENTITY, chunk=CHUNK, encryption={name: KEY})


def test_invalid_key_maps_are_refused(tmp_path: Path) -> None:
    for keys, message in (([KEY], "is of type list"), (KEY, "is of type bytes")):
        with pytest.raises(InvalidParameter, match=message):
            kvpack.Store(tmp_path, IDENTITY, chunk=CHUNK, encryption=keys)  # type: ignore[arg-type]


def planted_entry(store: kvpack.Store, cache: kvpack.Cache, ids: list[int], *, compress: bool = False) -> bytes:
    """Return an entry for the first chunk of ``ids`` that contains ``cache``.

    Its key, model, recipe and digests are correct.
    """
    ((key, parent, part, digest), *_) = chunk_links(store.identity.digest, token_bytes(ids[:CHUNK]), CHUNK, [b""])
    named = replace(cache, model=store.identity.header_model, recipe=store.identity.recipe, inputs=None)
    data = b"".join(to_pieces(named, key, parent, part, digest))
    if not compress:
        return data
    with container.open_bytes(data) as file:
        found = container.to_bytes(file.header, {name: file.tensor(name) for name in file.tensors}, compress=True)
    # The payload's digest is that of the bytes as they are stored.
    with container.open_bytes(found) as file:
        begin = min(place.begin for place in file.front.places.values())
        payload = xxhash.xxh3_128_digest(found[len(file.front.text) + begin :])
        contents, arrays = file.header, {name: bytes(file.tensor(name)) for name in file.tensors}
    feature = contents.ignorable[FEATURE]
    changed = {**contents.ignorable, FEATURE: feature[:64] + payload + feature[80:]}
    return container.to_bytes(replace(contents, ignorable=changed), arrays, compress=True)


def of_shape(heads: int = 2, dim: int = 32, tokens: int = CHUNK, layers: int = 2, batch: int = 1) -> kvpack.Cache:
    x = torch.zeros(batch, heads, tokens, dim)
    return kvpack.pack([(x, x)] * layers, IDENTITY.recipe)


def with_tail() -> kvpack.Cache:
    x = torch.zeros(1, 2, CHUNK, 32)
    return kvpack.pack([(x[:, :, :-1], x[:, :, :-1])] * 2, f"{IDENTITY.recipe};tail=32")


PLANTED = {
    "compressed": (lambda: of_shape(), True, "has the filter zstd, expected none in an entry"),
    "two sequences": (lambda: of_shape(batch=2), False, r"layers\[0\]\.k has 2 sequences of 32 packed"),
    "more tokens": (lambda: of_shape(tokens=3 * CHUNK), False, r"has 1 sequences of 96 packed .*, expected one sequence of 32"),
    "fewer tokens": (lambda: of_shape(tokens=CHUNK - 1), False, r"has 1 sequences of 31 packed"),
    "no tokens": (lambda: of_shape(tokens=0), False, r"has 1 sequences of 0 packed"),
    "a raw tail": (with_tail, False, "of 0 packed and 31 raw tokens"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_an_entry_that_is_not_one_chunk_of_one_sequence_is_refused_before_decoding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, compress, message = PLANTED[name]
    store, ids = open_store(tmp_path / "store"), prompt(1)
    whole = save(store, ids)
    path = Path(entry_of(store, ids, 0))
    path.write_bytes(planted_entry(store, made(), ids, compress=compress))
    monkeypatch.setattr(container.File, "read_side", lambda *_, **__: pytest.fail("a side was read"))
    other = open_store(tmp_path / "store")
    assert cli.main(["store", "verify", str(tmp_path / "store")]) == 1
    assert re.search(message, " ".join("".join(capsys.readouterr()).split()))
    assert other.load(ids) == (0, None)
    assert other.counters()["faults"] == {"load InvalidHeader": 1}
    assert other.counters()["damaged_entries"] == 1
    monkeypatch.undo()
    assert other.save(ids, whole) == CHUNK
    assert is_same_prefix(open_store(tmp_path / "store").load(ids)[1], whole)


@pytest.mark.parametrize("shape", [{"heads": 3}, {"dim": 64}, {"layers": 3}, {"layers": 1}, {"heads": 2000}])
def test_an_entry_with_another_shape_than_the_models_is_replaced(shape: dict[str, int], tmp_path: Path) -> None:
    store, ids = open_store(tmp_path / "store"), prompt(2)
    whole = save(store, ids)
    path = Path(entry_of(store, ids, 0))
    path.write_bytes(planted_entry(store, of_shape(**shape), ids))
    assert store.load(ids) == (0, None)
    assert store.counters()["damaged_entries"] == 1
    path.write_bytes(planted_entry(store, of_shape(**shape), ids))
    fresh = open_store(tmp_path / "store")
    assert fresh.save(ids, whole) == 2 * CHUNK
    assert is_same_prefix(fresh.load(ids)[1], whole)


def test_max_entry_bytes_limits_the_values_of_a_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An entry with few bytes per value is refused because of its decoded size, and commands refuse it too. It is not removed."""
    store, ids = open_store(tmp_path / "store"), prompt(1)
    save(store, ids)
    path = Path(entry_of(store, ids, 0))
    path.write_bytes(planted_entry(store, of_shape(heads=600), ids))
    limit = 2 * 2 * 600 * 32 * CHUNK - 1
    assert path.stat().st_size < limit
    for bound, found in ((limit, 0), (limit + 1, CHUNK)):
        other = open_store(tmp_path / "store", max_entry_bytes=bound)
        assert other.load(ids)[0] == found
        assert other.counters()["faults"] == ({} if found else {"load LimitExceeded": 1})
        assert other.counters()["damaged_entries"] == 0
    whole = of_shape(heads=700)
    small = open_store(tmp_path / "other", max_entry_bytes=2 * 2 * 700 * 32 * CHUNK - 1)
    assert small.save(ids[:CHUNK], whole) == 0
    assert small.counters()["faults"] == {"encode LimitExceeded": 1}


def test_a_header_much_larger_than_its_entry_allows_is_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is one of this reader, not a sign of damage, so the entry stays."""
    store, ids = open_store(tmp_path / "store"), prompt(1)
    whole = save(store, ids)
    path = Path(entry_of(store, ids, 0))
    # A header of 3 MB: an ignorable feature for each of 45 names.
    features = {f"junk-{number}": bytes(65536) for number in range(45)}
    named = replace(whole, model=store.identity.header_model, recipe=store.identity.recipe, inputs=None)
    chunk = named[:, :CHUNK]
    ((key, parent, part, digest), *_) = chunk_links(store.identity.digest, token_bytes(ids[:CHUNK]), CHUNK, [b""])
    with container.open_bytes(b"".join(to_pieces(chunk, key, parent, part, digest))) as file:
        arrays = {name: bytes(file.tensor(name)) for name in file.tensors}
        path.write_bytes(container.to_bytes(replace(file.header, ignorable={**file.header.ignorable, **features}), arrays))
    monkeypatch.setattr("kvpack.file.front.parse_header", lambda *_: pytest.fail("the header was parsed"))
    other = open_store(tmp_path / "store")
    assert other.load(ids) == (0, None)
    assert other.counters()["faults"] == {"load LimitExceeded": 1}
    assert other.counters()["damaged_entries"] == 0
    assert path.exists()
