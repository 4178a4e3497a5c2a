"""kvpack store: what each action prints, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack import cli

from store_caches import CHUNK, IDENTITY, cache, entries, entry_of, open_store, prompt, same, save  # isort: skip

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with two prefixes that share a chunk, and one of another recipe; the first is pinned."""
    store = open_store(tmp_path / "store")
    save(store, prompt(3, first=1, seed=1))
    save(store, prompt(2, first=1, seed=2))
    store.pin(prompt(3, first=1, seed=1))
    other = open_store(tmp_path / "store", kvpack.Identity("other", "bf16"))
    save(other, prompt(1))
    return tmp_path / "store"


def run(*words: object, code: int = 0) -> None:
    assert cli.main(["store", *map(str, words)]) == code


def printed(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    capsys.readouterr()
    run(*words, "--json", code=code)
    return json.loads(capsys.readouterr().out)


def test_ls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, "ls", folder)["prefixes"]
    assert [(row["model"]["name"], row["recipe"], row["tokens"], row["pinned"]) for row in rows] == [
        ("other", "bf16", CHUNK, False),
        ("model", "kivi-2", 2 * CHUNK, False),
        ("model", "kivi-2", 3 * CHUNK, True),
    ]
    store = open_store(folder)
    assert rows[2]["key"] == store.keys(prompt(3, first=1, seed=1))[-1].hex()
    assert sum(row["bytes"] for row in rows) > store.stats()["bytes"], "a shared chunk counts for both prefixes"
    run("ls", folder)
    text = capsys.readouterr().out
    assert "3 prefixes in 5 entries" in text
    assert rows[2]["key"][:16] in text
    times = [os.stat(path).st_mtime_ns for path in entries(folder)]
    run("ls", folder)
    assert [os.stat(path).st_mtime_ns for path in entries(folder)] == times, "to look at an entry is no use of it"


def test_a_prefix_without_its_beginning_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(folder)
    os.unlink(entry_of(store, prompt(3, first=1, seed=1), 0))
    rows = printed(capsys, "ls", folder)["prefixes"]
    assert [row["whole"] for row in rows] == [True, False, False]
    run("export", folder, rows[1]["key"], folder / "out", code=2)
    assert "what is before it is gone" in capsys.readouterr().err


def test_stat(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "stat", folder)
    assert (found["entries"], found["pinned"], found["unreadable"]) == (5, 3, 0)
    assert found["bytes"] == sum(os.stat(path).st_size for path in entries(folder))
    assert {(row["model"]["name"], row["recipe"]): row["tokens"] for row in found["identities"]} == {
        ("model", "kivi-2"): 4 * CHUNK,
        ("other", "bf16"): CHUNK,
    }
    run("stat", folder)
    assert "5 entries" in capsys.readouterr().out


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "verify", folder) == {"entries": 5, "refused": []}
    store = open_store(folder)
    flipped, renamed = (entry_of(store, prompt(3, first=1, seed=1), number) for number in (1, 2))
    with open(flipped, "r+b") as file:
        data = bytearray(file.read())
        data[-1] ^= 1
        file.seek(0)
        file.write(data)
    os.replace(renamed, renamed[:-1] + ("0" if renamed[-1] != "0" else "1"))
    refused = printed(capsys, "verify", folder, code=1)["refused"]
    assert len(refused) == 2
    assert {"damaged" in row["message"] or "names the key" in row["message"] for row in refused} == {True}
    run("verify", folder, "--delete", code=1)
    assert printed(capsys, "verify", folder) == {"entries": 3, "refused": []}


def test_gc(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "unfinished" / ".kvpack-x-y.tmp").write_bytes(b"part")
    found = printed(capsys, "gc", folder)
    assert (found["swept_files"], found["evicted_entries"], found["entries"]) == (1, 0, 5)
    found = printed(capsys, "gc", folder, "--max-bytes", 0)
    assert (found["evicted_entries"], found["entries"]) == (2, 3), "what is pinned stays"
    run("gc", folder)
    assert "removed 0 entries" in capsys.readouterr().out


def test_export_and_import(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = prompt(3, first=1, seed=1)
    store = open_store(folder)
    _, whole = store.load(ids)
    key = store.keys(ids)[2].hex()
    found = printed(capsys, "export", folder, key[:10], tmp_path / "one.kvpack")
    assert (found["tokens"], found["key"]) == (3 * CHUNK, key)
    assert same(kvpack.load(tmp_path / "one.kvpack"), whole)
    found = printed(capsys, "import", tmp_path / "new", tmp_path / "one.kvpack", "--tenant", "tenant", "--chunk", CHUNK)
    assert found == {"store": str(tmp_path / "new"), "tokens": 3 * CHUNK, "of": 3 * CHUNK, "new_entries": 3}
    imported = open_store(tmp_path / "new")
    assert imported.keys(ids) == store.keys(ids)
    n, again = imported.load(ids)
    assert n == 3 * CHUNK
    assert same(again, whole)
    assert open_store(tmp_path / "new", kvpack.Identity("model", "kivi-2")).match(ids) == 0


def test_import_of_a_file_without_token_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, ids = tmp_path / "plain.kvpack", prompt(2)
    whole = kvpack.pack(cache(len(ids)).unpack(), "kivi-2", model={"name": "model", "weights": "w1", "dtype": "bfloat16"})
    kvpack.save(whole, path)
    run("import", tmp_path / "store", path, code=2)
    assert "holds no token ids" in capsys.readouterr().err
    tokens = tmp_path / "ids.json"
    for text, code in (("{", 2), ('["a"]', 2), (json.dumps(ids), 0)):
        tokens.write_text(text)
        run("import", tmp_path / "store", path, "--tokens", tokens, "--tenant", IDENTITY.tenant, "--chunk", CHUNK, code=code)
    assert same(open_store(tmp_path / "store").load(ids)[1], whole)
    run("import", tmp_path / "store", path, "--tokens", tmp_path / "nothing", code=3)


def test_what_is_not_there_is_said(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in (["ls"], ["stat"], ["verify"], ["gc"]):
        run(*action, tmp_path / "nothing", code=3)
        assert "is no folder" in capsys.readouterr().err
    for key in ("", "xyz", "0123456789abcdef0"):
        run("export", folder, key, tmp_path / "out", code=2)
        assert "expected one" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["ls", "stat", "verify", "gc"])
def test_looking_at_a_store_imports_no_torch(action: str, folder: Path) -> None:
    script = "import sys\nfrom kvpack import cli\nassert cli.main(sys.argv[1:]) == 0\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script, "store", action, folder], check=True, capture_output=True)
