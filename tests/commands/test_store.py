"""Tests of ``kvpack store``: the output and exit code of each action."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack import cli
from kvpack.commands.command_store import parse_byte_count
from kvpack.file import container
from kvpack.file.inputs import ID_BYTES
from kvpack.file.limits import MAX_BINARY_BYTES
from kvpack.store.keys import token_bytes
from kvpack.store.transfer import read_exported
from support import basis_caches, redis_server, s3_server
from support.store_caches import CHUNK, IDENTITY, cache, entries, entry_of, is_same_prefix, open_store, prompt, rewrite, save

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a store with three prefixes: two that share a chunk, of which one is pinned, and one of another recipe."""
    store = open_store(tmp_path / "store")
    save(store, prompt(3, first=1, seed=1))
    save(store, prompt(2, first=1, seed=2))
    store.pin(prompt(3, first=1, seed=1))
    other = open_store(tmp_path / "store", kvpack.Identity("other", "kv=raw:dtype=bf16"))
    save(other, prompt(1))
    return tmp_path / "store"


def run(*words: object, code: int = 0) -> None:
    assert cli.main(["store", *map(str, words)]) == code


def printed(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> Any:
    capsys.readouterr()
    run(*words, "--json", code=code)
    return json.loads(capsys.readouterr().out)


def test_ls_lists_the_prefixes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, "ls", folder)["prefixes"]
    assert [(row["model"]["name"], row["recipe"], row["tokens"], row["pinned"]) for row in rows] == [
        ("other", "kv=raw:dtype=bf16", CHUNK, False),
        ("model", kvpack.Recipe("kivi-2").text, 2 * CHUNK, False),
        ("model", kvpack.Recipe("kivi-2").text, 3 * CHUNK, True),
    ]
    store = open_store(folder)
    assert rows[2]["key"] == store.keys(prompt(3, first=1, seed=1))[-1].hex()
    assert sum(row["bytes"] for row in rows) > store.stats()["bytes"], "a shared chunk was not counted for both prefixes"
    run("ls", folder)
    text = capsys.readouterr().out
    assert "3 prefixes in 5 entries" in text
    assert rows[2]["key"][:16] in text
    times = [os.stat(path).st_mtime_ns for path in entries(folder)]
    run("ls", folder)
    assert [os.stat(path).st_mtime_ns for path in entries(folder)] == times, "reading an entry with a command counted as a use"


def test_a_prefix_without_its_beginning_is_marked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(folder)
    os.unlink(entry_of(store, prompt(3, first=1, seed=1), 0))
    rows = printed(capsys, "ls", folder)["prefixes"]
    assert [row["whole"] for row in rows] == [True, False, False]
    run("export", folder, rows[1]["key"], folder / "out", code=2)
    assert "earlier entries no longer exist" in capsys.readouterr().err


def test_stat_prints_the_totals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "stat", folder)
    assert (found["entries"], found["pinned"], found["unreadable"]) == (5, 3, 0)
    assert found["bytes"] == sum(os.stat(path).st_size for path in entries(folder))
    assert {(row["model"]["name"], row["recipe"]): row["tokens"] for row in found["identities"]} == {
        ("model", kvpack.Recipe("kivi-2").text): 4 * CHUNK,
        ("other", "kv=raw:dtype=bf16"): CHUNK,
    }
    run("stat", folder)
    assert "5 entries" in capsys.readouterr().out


def test_verify_finds_damaged_entries(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "verify", folder) == {"entries": 5, "refused": [], "undecryptable": []}
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
    assert printed(capsys, "verify", folder) == {"entries": 3, "refused": [], "undecryptable": []}


def test_gc_evicts_to_the_budget(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "unfinished" / ".kvpack-1-0-locked.tmp").write_bytes(b"part")
    found = printed(capsys, "gc", folder)
    assert (found["swept_files"], found["evicted_entries"], found["entries"]) == (1, 0, 5)
    assert printed(capsys, "gc", folder, "--max-bytes", "1GB")["evicted_entries"] == 0
    found = printed(capsys, "gc", folder, "--max-bytes", 0)
    assert (found["evicted_entries"], found["entries"]) == (2, 3), "a pinned entry was removed"
    run("gc", folder)
    assert "removed 0 entries" in capsys.readouterr().out


def test_an_exported_prefix_can_be_imported(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = prompt(3, first=1, seed=1)
    store = open_store(folder)
    _, whole = store.load(ids)
    key = store.keys(ids)[2].hex()
    found = printed(capsys, "export", folder, key[:10], tmp_path / "one.kvpack")
    assert (found["tokens"], found["key"]) == (3 * CHUNK, key)
    assert is_same_prefix(kvpack.load(tmp_path / "one.kvpack"), whole)
    # The file names the tokens of a chunk.
    found = printed(capsys, "import", tmp_path / "new", tmp_path / "one.kvpack", "--tenant", "tenant", "--trust-names")
    assert found == {"store": str(tmp_path / "new"), "tokens": 3 * CHUNK, "of": 3 * CHUNK, "new_entries": 3}
    imported = open_store(tmp_path / "new")
    assert imported.keys(ids) == store.keys(ids)
    n, again = imported.load(ids)
    assert n == 3 * CHUNK
    assert is_same_prefix(again, whole)
    assert open_store(tmp_path / "new", kvpack.Identity("model", kvpack.Recipe("kivi-2").text)).match(ids) == 0


def test_a_file_with_its_token_ids_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``kvpack.save`` stores the ids of a KvpackCache under another feature than the export of a prefix does."""
    path, ids = tmp_path / "plain.kvpack", prompt(2)
    inputs = kvpack.Inputs(token_bytes(ids))
    whole = kvpack.pack(cache(len(ids)).unpack(), "kivi-2", model={"name": "model", "weights": "w1", "dtype": "bfloat16"}, inputs=inputs)
    kvpack.save(whole, path)
    words = ["--tenant", IDENTITY.tenant, "--chunk", CHUNK]
    run("import", tmp_path / "store", path, *words, code=2)
    assert f"claims to contain the keys and values of {len(ids):,} token ids" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
    run("import", tmp_path / "store", path, *words, "--trust-names")
    n, found = open_store(tmp_path / "store").load(ids)
    assert n == 2 * CHUNK
    assert is_same_prefix(found, whole[:, :n])
    tokens = tmp_path / "ids.json"
    tokens.write_text(json.dumps([ids[0] + 1, *ids[1:]]))
    run("import", tmp_path / "other", path, *words, "--tokens", tokens, "--trust-names", code=2)
    assert "token 0 of the cache was computed from id" in capsys.readouterr().err


@pytest.mark.parametrize("named", [None, b"", b"\0\0\0\0", b"\x20"])
def test_import_continues_chunks_in_the_store(
    named: bytes | None, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that does not record its chunk size is split into chunks like those of the prefix that the store already has."""
    ids = prompt(3, first=1, seed=1)
    key, file = open_store(folder).keys(ids)[2].hex(), tmp_path / "one.kvpack"
    run("export", folder, key, file)
    features = dict(container.open_file(file).header.ignorable)
    assert features.pop("chunk-tokens") == CHUNK.to_bytes(4, "little")
    rewrite(file, features if named is None else {**features, "chunk-tokens": named})
    words = [file, "--tenant", "tenant", "--trust-names"]
    capsys.readouterr()
    open_store(folder).delete(ids, start=2 * CHUNK)
    assert printed(capsys, "import", folder, *words)["new_entries"] == 1
    run("import", tmp_path / "empty", *words)
    assert "here of 256 tokens (--chunk)" in capsys.readouterr().err


def test_import_of_less_than_a_chunk_explains_why_nothing_is_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, ids = tmp_path / "short.kvpack", prompt(1)[: CHUNK - 1]
    kvpack.save(kvpack.pack(cache(len(ids)).unpack(), "kivi-2", model="m", inputs=kvpack.Inputs(token_bytes(ids))), path)
    run("import", tmp_path / "store", path, "--chunk", CHUNK, "--trust-names")
    printed = capsys.readouterr()
    assert f"0 of {len(ids)} tokens stored" in printed.out
    assert f"note: {path} has {len(ids)} tokens: a store keeps only whole chunks, here of {CHUNK} tokens (--chunk)" in printed.err


def test_import_refuses_a_file_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, ids = tmp_path / "nameless.kvpack", prompt(2)
    kvpack.save(kvpack.pack(cache(len(ids)).unpack(), "kivi-2", inputs=kvpack.Inputs(token_bytes(ids))), path)
    run("import", tmp_path / "store", path, "--chunk", CHUNK, "--trust-names", code=2)
    assert f"{path} names no model" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_token_ids_stored_in_several_features_are_read(tmp_path: Path) -> None:
    path, ids = tmp_path / "long.kvpack", list(range(MAX_BINARY_BYTES // ID_BYTES + 5))
    x = torch.zeros(1, 1, len(ids), 2)
    kvpack.save(kvpack.pack([(x, x)], "raw", inputs=kvpack.Inputs(token_bytes(ids))), path)
    assert read_exported(path, None, "").ids == ids


def test_a_file_with_some_of_its_token_ids_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, ids = tmp_path / "plain.kvpack", prompt(2)
    kvpack.save(kvpack.pack(cache(len(ids)).unpack(), "kivi-2", inputs=kvpack.Inputs(token_bytes(ids[:40]))), path)
    run("import", tmp_path / "store", path, "--trust-names", code=2)
    assert f"has the ids of 40 of its {len(ids)} tokens: pass all of them as a JSON array with --tokens" in capsys.readouterr().err


def test_a_file_without_token_ids_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, ids = tmp_path / "plain.kvpack", prompt(2)
    whole = kvpack.pack(cache(len(ids)).unpack(), "kivi-2", model={"name": "model", "weights": "w1", "dtype": "bfloat16"})
    kvpack.save(whole, path)
    run("import", tmp_path / "store", path, code=2)
    assert "contains no token ids" in capsys.readouterr().err
    tokens = tmp_path / "ids.json"
    for text, code in (("{", 2), ('["a"]', 2), (json.dumps(ids), 0)):
        tokens.write_text(text)
        words = ["--tokens", tokens, "--tenant", IDENTITY.tenant, "--chunk", CHUNK, "--trust-names"]
        run("import", tmp_path / "store", path, *words, code=code)
    assert is_same_prefix(open_store(tmp_path / "store").load(ids)[1], whole)
    run("import", tmp_path / "store", path, "--tokens", tmp_path / "nothing", code=3)


def test_a_missing_store_is_reported(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in (["ls"], ["stat"], ["verify"], ["gc"]):
        run(*action, tmp_path / "nothing", code=3)
        assert "does not exist; a store creates its folder when it stores its first chunk" in capsys.readouterr().err
        (tmp_path / "file").touch()
        run(*action, tmp_path / "file", code=3)
        assert "is not a folder" in capsys.readouterr().err
        run(*action, tmp_path, code=3)
        assert "is not a store" in capsys.readouterr().err
    open_store(tmp_path).collect()
    assert sorted(os.listdir(tmp_path)) == ["file", "store"]
    for key in ("", "xyz", "0123456789abcdef0"):
        run("export", folder, key, tmp_path / "out", code=2)
        assert "no stored key starts with" in capsys.readouterr().err


@pytest.mark.scenario
@pytest.mark.parametrize("action", ["ls", "stat", "verify", "gc"])
def test_reading_a_store_does_not_import_torch(action: str, folder: Path) -> None:
    script = "import sys\nfrom kvpack import cli\nassert cli.main(sys.argv[1:]) == 0\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script, "store", action, folder], check=True, capture_output=True)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """Write a file with two keys and return its path. The first key is the one that encrypts."""
    path = tmp_path / "keys"
    path.write_text(f"# the key in use\nnew {bytes(range(16)).hex()}\n\nold {bytes(32).hex()} # until May\n")
    path.chmod(0o600)
    return path


def test_encrypted_entries_are_shown_with_and_without_their_key(
    key_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cryptography")
    folder, ids = tmp_path / "store", prompt(3)
    whole = save(open_store(folder, encryption={"old": bytes(32)}), ids)
    found = printed(capsys, "ls", folder)
    assert (found["prefixes"], len(found["unreadable"])) == ([], 3)
    found = printed(capsys, "verify", folder, "--delete")
    assert (len(found["undecryptable"]), found["refused"]) == (3, []), "an entry without its key was removed"
    for words in (["--key-file", key_file], ["--key-file", key_file, "--tenant", "other"]):
        found = printed(capsys, "verify", folder, *words)
        assert len(found["undecryptable"]) == 3, "entries of another tenant were decrypted"
    words = ["--key-file", key_file, "--tenant", IDENTITY.tenant]
    assert printed(capsys, "verify", folder, *words) == {"entries": 3, "refused": [], "undecryptable": []}
    monkeypatch.setenv("KVPACK_KEY_FILE", str(key_file))
    (row,) = printed(capsys, "ls", folder, "--tenant", IDENTITY.tenant)["prefixes"]
    assert (row["tokens"], row["whole"]) == (3 * CHUNK, True)
    assert printed(capsys, "stat", folder, "--tenant", IDENTITY.tenant)["unreadable"] == 0
    printed(capsys, "export", folder, row["key"], tmp_path / "out.kvpack", "--tenant", IDENTITY.tenant)
    assert is_same_prefix(kvpack.load(tmp_path / "out.kvpack"), whole)
    printed(capsys, "import", tmp_path / "again", tmp_path / "out.kvpack", "--tenant", IDENTITY.tenant, "--chunk", CHUNK, "--trust-names")
    assert is_same_prefix(open_store(tmp_path / "again", encryption={"new": bytes(range(16))}).load(ids)[1], whole)
    key_file.write_text(f"third {bytes(16).hex()}")
    found = printed(capsys, "import", tmp_path / "again", tmp_path / "out.kvpack", *words[2:], "--chunk", CHUNK, "--trust-names", code=3)
    assert (found["tokens"], found["new_entries"]) == (0, 0), "entries of another key were replaced"
    with open(entries(folder)[0], "r+b") as file:
        file.seek(3000)
        file.write(b"damage")
    monkeypatch.delenv("KVPACK_KEY_FILE")
    found = printed(capsys, "verify", folder, code=1)
    assert (len(found["undecryptable"]), len(found["refused"])) == (2, 1), "damage was not found without the key"


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("a 00", 0o640, "has mode 0640, but only its owner"),
        ("# none", 0o600, "has no keys, expected an id and a hexadecimal key"),
        ("a", 0o600, "line 1: expected an id and a hexadecimal key"),
        ("a 00 00", 0o600, "line 1: expected an id and a hexadecimal key"),
        ("\na xyz", 0o600, "line 2: expected an id and a hexadecimal key"),
        ("a 0011", 0o600, "has 2 bytes, expected 16, 24 or 32"),
        (f"a {'00' * 16}\nb {'00' * 16}\na {'11' * 16}", 0o600, "line 3 repeats the id 'a' of line 1"),
        (f"a\x1b[2J {'00' * 16}", 0o600, "printable text"),
    ],
)
def test_invalid_key_files_are_refused(
    text: str, mode: int, message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cryptography")
    (tmp_path / "keys").write_text(text)
    (tmp_path / "keys").chmod(mode)
    run("ls", folder, "--key-file", tmp_path / "keys", code=2)
    assert message in (said := capsys.readouterr().err)
    assert "xyz" not in said
    run("ls", folder, "--key-file", tmp_path / "nothing", code=3)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name, what in ((tmp_path / "fifo", "is a FIFO"), ("/dev/zero", "is a device"), (tmp_path, "is a folder")):
        run("ls", folder, "--key-file", name, code=3)
        assert what in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["redis", "s3"])
@pytest.mark.parametrize("action", ["ls", "stat", "verify", "gc", "export"])
def test_a_dead_server_is_reported_on_one_line(
    kind: str, action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({"redis": "redis", "s3": "obstore"}[kind])
    for variable, value in (("AWS_ENDPOINT_URL", "http://127.0.0.1:1"), ("AWS_ACCESS_KEY_ID", "k"), ("AWS_SECRET_ACCESS_KEY", "s")):
        monkeypatch.setenv(variable, value)
    url = {"redis": "redis://:secret@127.0.0.1:1", "s3": "s3://bucket/prefix"}[kind]
    words = ["00", tmp_path / "out"] if action == "export" else []
    for options in ([], ["--json"]):
        run(action, url, *words, *options, code=3)
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
        assert said.err.startswith(f"kvpack: {url.replace(':secret@', '***@')}: ")
        assert "secret" not in said.err
        assert said.err.endswith("check the server and its URL\n")
    assert not (tmp_path / "out").exists()


def test_a_partially_working_store_is_reported(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.store.directory import Directory

    real = Directory.peek

    def peek(self: Directory, key: bytes, **options: Any) -> Any:
        if key.hex() == os.path.basename(entries(folder)[2]):
            self._counters.fault("get", OSError(5, "Input/output error"))
            return None
        return real(self, key, **options)

    monkeypatch.setattr(Directory, "peek", peek)
    for action in ("ls", "stat", "verify"):
        run(action, folder, code=3)
        said = capsys.readouterr()
        assert said.err == f"kvpack: {folder}: 'get' failed: [Errno 5] Input/output error\n"
        assert said.out


def test_verify_exits_with_the_worst_code(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.file.container import File

    damaged, unread = entries(folder)[1:3]
    with open(damaged, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    run("verify", folder, code=1)
    real = File.verify

    def verify(self: File, *words: Any) -> None:
        if self.where.endswith(os.path.basename(unread)):
            raise MemoryError
        real(self, *words)

    monkeypatch.setattr(File, "verify", verify)
    capsys.readouterr()
    run("verify", folder, "--delete", code=3)
    assert "not enough memory to read its" in capsys.readouterr().err
    assert os.path.exists(unread), "exhausted memory was reported as damage"
    assert not os.path.exists(damaged)


def test_token_ids_named_by_a_file_are_used_only_on_request(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = prompt(3, first=1, seed=1)
    run("export", folder, open_store(folder).keys(ids)[2].hex(), tmp_path / "one.kvpack")
    words = ["import", tmp_path / "new", tmp_path / "one.kvpack", "--tenant", IDENTITY.tenant, "--chunk", CHUNK]
    run(*words, code=2)
    said = capsys.readouterr().err
    assert f"of {3 * CHUNK} token ids of the model 'model', weights 'w1'" in said
    assert "processes that load these ids get the values in the file" in said
    assert "--trust-names" in said
    assert not (tmp_path / "new").exists()
    run(*words, "--trust-names")
    assert open_store(tmp_path / "new").match(ids) == 3 * CHUNK


def test_unreadable_token_ids_are_reported(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("export", folder, open_store(folder).keys(prompt(3, first=1, seed=1))[2].hex(), tmp_path / "one.kvpack")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "deep").write_text("[" * 100_000)
    bad = {tmp_path / "fifo": (3, "is a FIFO"), "/dev/zero": (3, "is a device"), tmp_path / "deep": (2, "nested too deep")}
    for name, (code, message) in bad.items():
        run("import", tmp_path / "new", tmp_path / "one.kvpack", "--tokens", name, "--trust-names", code=code)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "x", "0.5", "", "1XB", "1e9", "0.1KB 5"])
def test_impossible_sizes_are_refused(number: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("ls", folder, f"--max-entry-bytes={number}")
    assert stopped.value.code == 2
    assert re.search("must be a size in bytes, such as 1000000000, 1GB or 512MiB|must be at least 1 byte", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("1000", 1000), ("10B", 10), ("1GB", 10**9), ("1.5 GiB", 3 * 2**29), ("512MiB", 2**29), ("2kb", 2000), ("0.0009KB", 0)],
)
def test_sizes_have_units(text: str, count: int) -> None:
    assert parse_byte_count(text) == count


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_the_commands_work_on_servers(
    kind: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip({"redis": "redis", "s3": "obstore"}[kind])
    with redis_server.run_server(tmp_path) if kind == "redis" else s3_server.run_server() as server:
        if kind == "s3":
            for name, variable in s3_server.VARIABLES.items():
                monkeypatch.setenv(variable, server.options[name])
        ids = prompt(3, first=1, seed=1)
        key = open_store(folder).keys(ids)[2].hex()
        run("export", folder, key, tmp_path / "one.kvpack")
        run("import", server.url, tmp_path / "one.kvpack", "--tenant", IDENTITY.tenant, "--chunk", CHUNK, "--trust-names")
        (row,) = printed(capsys, "ls", server.url)["prefixes"]
        assert (row["key"], row["tokens"]) == (key, 3 * CHUNK)
        assert printed(capsys, "stat", server.url)["entries"] == 3
        assert printed(capsys, "verify", server.url) == {"entries": 3, "refused": [], "undecryptable": []}
        run("export", server.url, key, tmp_path / "two.kvpack")
        assert (tmp_path / "two.kvpack").read_bytes() == (tmp_path / "one.kvpack").read_bytes()
        if kind == "redis":
            # A server without passwords accepts any, and none is printed.
            secret = server.url.replace("//", "//default:secret@")
            words = ["import", secret, tmp_path / "one.kvpack", "--tenant", IDENTITY.tenant, "--trust-names"]
            assert printed(capsys, *words)["store"] == server.url.replace("//", "//***@")
            run(*words)
            assert "secret" not in capsys.readouterr().out
        found = printed(capsys, "gc", server.url, "--max-bytes", 0)
        assert (found["evicted_entries"], found["entries"], found["faults"]) == (3, 0, {})


@pytest.fixture
def based(tmp_path: Path) -> Path:
    """Return a store with one prefix whose recipe needs a basis, and the file with that basis."""
    (tmp_path / "x.kvbasis").write_bytes(basis_caches.BASIS.data)
    with basis_caches.with_basis(tmp_path / "based") as store:
        basis_caches.save(store, prompt(3))
    return tmp_path / "based"


def test_bases_are_listed_counted_and_checked(based: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest, size = basis_caches.BASIS.digest.hex(), len(basis_caches.BASIS.data)
    (row,) = printed(capsys, "ls", based)["bases"]
    assert (row["key"], row["digest"], row["model"], row["bytes"], row["entries"]) == (digest, digest, {"name": "x"}, size, 3)
    run("ls", based)
    text = capsys.readouterr().out
    assert "1 prefix in 3 entries" in text
    assert f"basis {digest[:16]} of x, {size:,} bytes, needed by 3 chunks" in text
    found = printed(capsys, "stat", based)
    assert (found["entries"], found["bases"], found["unreadable"]) == (4, 1, 0)
    run("stat", based)
    assert "1 of them is bases" in capsys.readouterr().out
    assert printed(capsys, "verify", based) == {"entries": 4, "refused": [], "undecryptable": []}
    assert printed(capsys, "gc", based)["entries"] == 4
    path = based / digest[0] / digest[1] / digest
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    (refused,) = printed(capsys, "verify", based, code=1)["refused"]
    assert refused["key"] == digest
    assert "is damaged: its basis has the SHA-256" in refused["message"]
    assert printed(capsys, "ls", based)["bases"] == []
    run("verify", based, "--delete", code=1)
    assert not path.exists()


def test_a_prefix_with_a_basis_is_exported_by_the_store_and_imported_with_the_file(
    based: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = printed(capsys, "ls", based)["prefixes"]
    out = tmp_path / "one.kvpack"
    assert printed(capsys, "export", based, row["key"][:12], out)["tokens"] == 3 * CHUNK
    run("import", tmp_path / "new", out, "--trust-names", "--tenant", "tenant", code=1)
    assert f"the basis {basis_caches.BASIS.digest.hex()} is needed" in capsys.readouterr().err
    words = ["import", tmp_path / "new", out, "--trust-names", "--tenant", "tenant", "--chunk", CHUNK, "--basis", tmp_path]
    assert printed(capsys, *words)["tokens"] == 3 * CHUNK
    with basis_caches.without_basis(tmp_path / "new") as store:
        assert is_same_prefix(store.load(prompt(3))[1], basis_caches.cache_with_basis(len(prompt(3))))
    digest = basis_caches.BASIS.digest.hex()
    path = based / digest[0] / digest[1] / digest
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    before = path.stat().st_mtime_ns
    run("export", based, row["key"][:12], tmp_path / "two.kvpack", code=1)
    assert "is damaged: its basis" in capsys.readouterr().err
    assert path.stat().st_mtime_ns == before, "a read-only command changed the store"
