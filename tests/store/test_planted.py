"""Entries that somebody planted who may write at the location: none is served, none hides a good one for long, none takes memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_python

import kvpack
from kvpack import cli
from kvpack.formats.errors import InvalidParameter
from kvpack.store.encryption import Cipher
from kvpack.store.forms import MAGIC, Form, Kind, sealed_bytes

from store_caches import CHUNK, IDENTITY, KEYS, OTHER_KEYS, cache, entry_of, open_store, prompt, same, save  # isort: skip

pytest.importorskip("cryptography")

(KEY,) = KEYS.values()

IN_A_CHILD = """
import json, os, resource, sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from kvpack import cli
from store_caches import IDENTITY, cache, entry_of, open_store, prompt
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
def test_an_entry_of_2_gib_takes_no_memory(name: str, key_file: Path, tmp_path: Path) -> None:
    words = [warm_python.python(), "-c", IN_A_CHILD, str(tmp_path), str(Path(__file__).parents[1] / "support"), name]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, codes, grown, faults, exported = json.loads(done.stdout.splitlines()[-1])
    assert found[0] == CHUNK
    assert codes[1:] == [1, 0, 1]
    assert not exported
    assert faults == {"get LimitExceeded": 1}
    assert grown < 100 * 1024, f"{grown} KiB more were needed"
    assert done.stderr.count("max_entry_bytes is 536870912") >= 2


def test_an_entry_that_is_larger_than_allowed_is_neither_read_nor_saved(tmp_path: Path) -> None:
    ids = prompt(3)
    whole = save(open_store(tmp_path / "store"), ids)
    size = os.stat(entry_of(open_store(tmp_path / "store"), ids, 0)).st_size
    small = open_store(tmp_path / "store", max_entry_bytes=size - 1)
    assert small.load(ids) == (0, None)
    assert small.counters()["faults"] == {"get LimitExceeded": 1}
    more = prompt(2, seed=4)
    assert small.save(more, cache(len(more))) == 0
    assert small.counters()["faults"]["encode LimitExceeded"] == 1
    assert same(open_store(tmp_path / "store", max_entry_bytes=size).load(ids)[1], whole), "a limit of the caller removes nothing"
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


def test_where_memory_ends_nothing_panics() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(Path(__file__).parents[1] / "support")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == {"MemoryError", ""}, done.stderr
    assert "panicked" not in done.stderr


def test_what_is_damaged_inside_goes_with_the_next_load(tmp_path: Path) -> None:
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


def test_commands_with_keys_refuse_what_is_not_encrypted(
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
    assert [row["tokens"] for row in found["prefixes"]] == [CHUNK, CHUNK], "the chunks before it and after it"
    assert list(found["unreadable"]) == [key]
    assert "is not encrypted" in found["unreadable"][key]
    assert found["undecryptable"] == []
    run("ls", folder, *words, code=0)
    assert "1 entries refused as damaged, not encrypted or too large" in capsys.readouterr().out
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
    assert "2 encrypted entries not readable without keys: give --key-file" in said
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
    assert same(store.load(ids)[1], whole)


def test_what_is_planted_under_another_name_is_not_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, ids = open_store(tmp_path / "store"), prompt(2)
    save(store, ids)
    first, second = (Path(entry_of(store, ids, number)) for number in range(2))
    second.write_bytes(first.read_bytes())
    found = printed(capsys, "ls", tmp_path / "store")
    assert [row["tokens"] for row in found["prefixes"]] == [CHUNK]
    assert "the entry's key is" in found["unreadable"][store.keys(ids)[1].hex()]


@pytest.mark.parametrize(
    ("form", "beginning", "size", "kind"),
    [
        (Form(), b"\0" * 8 + b'{"__metadata__":{"format":"kvpack","kvpack":"1 ', 5000, Kind.READABLE),
        (Form(), b"\0" * 8 + b'{"__metadata__":{"format":"kvpack","kvpack":"7 ', 5000, Kind.READABLE),
        (Form(), bytes(512), 5000, Kind.JUNK),
        (Form(), b"", 0, Kind.JUNK),
        (Form(max_bytes=4999), b"\0" * 8 + b'{"__metadata__":{"format":"kvpack","kvpack":"1 ', 5000, Kind.JUNK),
        (Form(), MAGIC + b"\1k", 5000, Kind.FOREIGN),
        (Form(), b"kvpack-encrypted 12\n", 5000, Kind.FOREIGN),
        (Form(), b"kvpack-encrypted 0\n", 5000, Kind.JUNK),
        (Form(key_ids=frozenset({b"k"})), MAGIC + b"\1k", 5000, Kind.READABLE),
        (Form(key_ids=frozenset({b"k"})), MAGIC + b"\1k", sealed_bytes(b"k", 0), Kind.READABLE),
        (Form(key_ids=frozenset({b"k"})), MAGIC + b"\1k", sealed_bytes(b"k", 0) - 1, Kind.JUNK),
        (Form(key_ids=frozenset({b"k"})), MAGIC + b"\2k", 21, Kind.JUNK),
        (Form(key_ids=frozenset({b"k"})), MAGIC, 5000, Kind.JUNK),
        (Form(key_ids=frozenset({b"k"})), MAGIC + b"\1l", 5000, Kind.FOREIGN),
        (Form(key_ids=frozenset({b"k"})), b"\0" * 8 + b'{"__metadata__":{"format":"kvpack","kvpack":"1 ', 5000, Kind.JUNK),
    ],
    ids=str,
)
def test_the_form_of_an_entry_is_told_from_its_beginning_and_size(form: Form, beginning: bytes, size: int, kind: Kind) -> None:
    assert form.kind(beginning, size) is kind


@pytest.mark.parametrize("name", ["a\nb", "\ufeffk", "a\0", "\ud800", "a\tb"])
def test_ids_that_nobody_could_read_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="bytes of printable text"):
        kvpack.Store(tmp_path, IDENTITY, chunk=CHUNK, encryption={name: KEY})


def test_what_is_no_map_of_keys_is_refused(tmp_path: Path) -> None:
    for keys, message in (([KEY], "is of type list"), (KEY, "is of type bytes")):
        with pytest.raises(InvalidParameter, match=message):
            kvpack.Store(tmp_path, IDENTITY, chunk=CHUNK, encryption=keys)  # type: ignore[arg-type]
