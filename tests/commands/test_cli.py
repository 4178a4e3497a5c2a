"""The command line: outputs, exit codes and messages."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from caches import dense, random_pairs
from safetensors.torch import load_file, save_file

import kvpack
from kvpack import cli
from kvpack.formats import errors
from kvpack.output import printable, progress

if TYPE_CHECKING:
    from pathlib import Path

RECIPE = "kivi-2;layers=0:k=raw;tail=32"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cache.kvpack"
    kvpack.save(kvpack.pack(random_pairs(3, 100), RECIPE, model={"name": "toy", "revision": "7"}, start=256), path)
    return path


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


def run_json(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert run(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def in_process(*words: object, code: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """The command line in a fresh interpreter; ``code`` runs after it, with the exit code in ``exit_code``."""
    script = f"import sys\nfrom kvpack.cli import main\nexit_code = main(sys.argv[1:])\n{code}\nsys.exit(exit_code)"
    return subprocess.run([sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True, check=False, **options)


def test_inspect(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_json(capsys, "inspect", file)
    cache = kvpack.load(file)
    assert summary["bytes"] == file.stat().st_size == cache.nbytes
    assert summary["values"] == cache.values == 3 * 2 * 2 * 100 * 64
    assert summary["bits_per_value"] == cache.bits_per_value == 8 * cache.nbytes / cache.values
    assert summary["nominal_bits"] == pytest.approx(cache.nominal_bits)
    assert (summary["start"], summary["stop"]) == (256, 356)
    assert summary["model"] == {"name": "toy", "revision": "7"}
    assert summary["recipe"] == RECIPE
    assert sum(summary["streams"].values()) == summary["bytes"]
    assert [codec["id"] for codec in summary["codecs"]] == ["raw", "group", "group"]
    side = summary["layers"][1]["k"]
    assert (side["tokens"], side["packed_tokens"], side["tail_tokens"], side["window"], side["dim"]) == (100, 96, 4, 32, 64)
    assert side["stored_bytes"] == sum(t["stored_bytes"] for t in summary["tensors"] if t["name"].startswith("1.k."))
    assert all(len(tensor["xxh3_128"]) == 32 for tensor in summary["tensors"])


def test_inspect_as_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", file) == 0
    text = capsys.readouterr().out
    assert f"{file.stat().st_size:,} bytes" in text
    assert "tokens 256 to 356" in text
    assert "name toy, revision 7" in text
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["1-2", "k", "group bits=2 axis=token size=32", "1", "2", "100", "4", "64"] in [row[:8] for row in rows]
    assert "header and padding" in {row[0] for row in rows}


def test_an_empty_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.kvpack"
    kvpack.save(kvpack.pack(random_pairs(1, 0), "kivi-2"), path)
    summary = run_json(capsys, "inspect", path)
    assert summary["values"] == summary["bits_per_value"] == 0
    assert run("inspect", path) == run("verify", path) == 0


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_headers_are_read_without_torch(command: str, file: Path) -> None:
    checked = in_process(command, file, code="assert 'torch' not in sys.modules and 'transformers' not in sys.modules")
    assert (checked.returncode, checked.stderr) == (0, "")
    without = in_process(command, "--json", file, code="assert 'rich' not in sys.modules")
    assert (without.returncode, without.stderr) == (0, "")


def test_verify(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged, missing = tmp_path / "damaged.kvpack", tmp_path / "missing.kvpack"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert run("verify", file) == 0
    assert f"{file}: {len(data):,} bytes, 3 layers, all checked" in capsys.readouterr().out
    assert run("verify", damaged, file) == 1
    assert run("verify", damaged, file, missing, "--json") == 3
    results = json.loads(capsys.readouterr().out.partition("all checked\n")[2])
    assert [result["ok"] for result in results] == [False, True, False]
    assert [result.get("error") for result in results] == ["DigestMismatch", None, "MissingFile"]


def test_verify_removes_what_killed_writers_left(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    dead, old, held = (folder / f".kvpack-999999999-{name}.tmp" for name in ("aa-locked", "bb", "cc-locked"))
    beside = tmp_path / ".kvpack-1-dd-locked.tmp"
    for path in (dead, old, held, beside):
        path.write_bytes(b"part")
    assert run("verify", file) == 0
    assert {dead.exists(), beside.exists()} == {True}
    with held.open() as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        capsys.readouterr()
        report = run_json(capsys, "verify", "--clean", file, folder)
        assert [result.get("file") for result in report] == [str(file), None, None]
        assert report[1] == {"folder": str(tmp_path), "removed": [str(beside)], "kept": []}
        assert (report[2]["removed"], sorted(report[2]["kept"])) == ([str(dead)], sorted([str(old), str(held)]))
        assert run("verify", "--clean", folder) == 0
    printed = capsys.readouterr().out.splitlines()
    kept = "kept, a process may be writing it; if none is, delete it yourself"
    assert sorted(printed[:2]) == sorted([f"{old}: {kept}", f"{held}: {kept}"])
    assert printed[2:] == [f"{folder}: 0 unfinished files removed"]
    assert run("verify", "--clean", folder) == 0
    assert f"{held}: removed, its writer was killed" in capsys.readouterr().out.splitlines()
    assert os.listdir(folder) == [old.name]


def test_the_worst_code_of_several_files(file: Path, tmp_path: Path) -> None:
    """As diff and grep do: nothing is known of a file that could not be read."""
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"nonsense")
    for order in ([damaged, tmp_path, file], [tmp_path, file, damaged]):
        assert run("verify", *order) == 3
    assert run("verify", file, damaged) == 1
    assert run("verify", file, file) == 0
    assert kvpack.errors.WORST_FIRST == (3, 2, 1, 0)
    for codes, worst in (((), 0), ((0, 1), 1), ((1, 3, 2), 3), ((2, 1), 2)):
        assert kvpack.errors.worst_exit_code(codes) == worst


def test_every_error_is_where_users_look() -> None:
    classes = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.KvpackError)}
    assert len(classes) >= 20
    for name, kind in classes.items():
        assert getattr(kvpack, name) is getattr(kvpack.errors, name) is kind
        assert name in kvpack.__all__
        assert name in kvpack.errors.__all__
        assert kind.exit_code in kvpack.errors.WORST_FIRST


def _bad_files(file: Path) -> dict[str, bytes]:
    data = file.read_bytes()
    newer = data.replace(b'"kvpack":"1 ', b'"kvpack":"2 ', 1)
    header = data.index(b"format", 4096)
    damaged_header = data[: header + 3] + b"X" + data[header + 4 :]
    return {
        "empty": b"",
        "short": b"kv",
        "truncated": data[:-64],
        "extended": data + b"\0",
        "not kvpack": b"hello, world, this is a text",
        "newer": newer,
        "damaged": data[:-1] + bytes([data[-1] ^ 4]),
        "damaged header": damaged_header,
    }


EXPECTED = {
    "empty": errors.NotKvpack,
    "short": errors.NotKvpack,
    "truncated": errors.Truncated,
    "extended": errors.Truncated,
    "not kvpack": errors.NotKvpack,
    "newer": errors.UnsupportedVersion,
    "damaged": errors.DigestMismatch,
    "damaged header": errors.DigestMismatch,
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_bad_files(kind: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.kvpack"
    bad.write_bytes(_bad_files(file)[kind])
    with pytest.raises(EXPECTED[kind]) as raised:
        kvpack.load(bad)
    assert str(bad) in str(raised.value)
    out = tmp_path / "out"
    for words in (["verify", bad], ["convert", bad, out, "kivi-4"], ["unpack", bad, out]):
        assert run(*words) == 1
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == ("", f"kvpack: {raised.value}\n")
        assert not out.exists()


@pytest.mark.parametrize("command", ["inspect", "verify", "convert", "unpack", "pack"])
def test_a_missing_file(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    more = {"convert": ["out", "kivi-2"], "unpack": ["out"], "pack": ["out", "--recipe", "kivi-2"]}.get(command, [])
    assert run(command, missing, *more) == 3
    assert capsys.readouterr().err.startswith(f"kvpack: {missing}: could not be opened: No such file")


@pytest.mark.parametrize("recipe", ["kivi-5", "kv=grup:b=2", "kv=group:b=99", "kv=group:b=2,w=1"])
def test_an_unknown_word_of_a_recipe(recipe: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(errors.InvalidRecipe) as raised:
        kvpack.load(file).convert(recipe)
    assert run("convert", file, tmp_path / "out", recipe) == 2
    assert capsys.readouterr().err == f"kvpack: {raised.value}\n"
    assert run("demo", "--recipe", recipe) == run("bench", "io", "--recipe", recipe) == 2


def test_a_folder_that_cannot_be_written(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["convert", file, tmp_path / "no" / "out", "kivi-4"], ["unpack", file, tmp_path / "no" / "out"]):
        assert run(*words) == 3
        assert capsys.readouterr().err == f"kvpack: {tmp_path}/no/out: could not be written: No such file or directory\n"


def test_convert(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.kvpack"
    report = run_json(capsys, "convert", file, out, "kivi-4", "--durable")
    assert report["bytes"] == out.stat().st_size
    assert report["bits_per_value"] == 8 * report["bytes"] / report["values"]
    converted = kvpack.load(out)
    assert (converted.recipe, converted.start, dict(converted.model)) == ("kivi-4", 256, {"name": "toy", "revision": "7"})
    assert run("convert", file, file, "raw", "--compress") == 0
    assert f"{file}: {file.stat().st_size:,} bytes" in capsys.readouterr().out
    assert kvpack.load(file).recipe == "raw"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_unpack_and_pack(dtype: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, packed = tmp_path / "dense.safetensors", tmp_path / "packed.kvpack"
    report = run_json(capsys, "unpack", file, plain, "--dtype", dtype)
    assert report["bytes"] == plain.stat().st_size
    tensors = load_file(plain)
    cache = kvpack.load(file)
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    assert list(tensors) == [f"{layer}.{side}" for layer in range(3) for side in "kv"]
    for number, layer in enumerate(cache):
        for side, x in zip("kv", layer.unpack(wanted), strict=True):
            assert torch.equal(tensors[f"{number}.{side}"], x)
    assert run("pack", plain, packed, "--recipe", f"kv=raw:dtype={dtype}") == 0
    again = kvpack.load(packed)
    assert (again.start, dict(again.model)) == (256, {"name": "toy", "revision": "7"})
    assert all(torch.equal(a, b) for a, b in zip(dense(again), [x.float() for x in tensors.values()], strict=True))


def test_pack_of_one_sided_layers(tmp_path: Path) -> None:
    plain, packed = tmp_path / "dense.safetensors", tmp_path / "packed.kvpack"
    save_file({"0.k": torch.randn(1, 2, 5, 64), "1.v": torch.randn(1, 2, 5, 32)}, plain)
    assert run("pack", plain, packed, "--recipe", "kivi-2") == 0
    cache = kvpack.load(packed)
    assert [list(layer.sides) for layer in cache] == [["k"], ["v"]]
    assert (cache.start, dict(cache.model)) == (0, {})


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"0.k": (1, 1, 4, 64), "past.0.value": (1, 1, 4, 64)}, None, r"the tensor 'past\.0\.value' is not named"),
        ({"0.k": (1, 1, 4, 64), "2.k": (1, 1, 4, 64)}, None, r"has the layers \[0, 2\], expected every layer from 0"),
        ({}, None, r"has the layers \[\], expected every layer from 0"),
        ({"0.k": (1, 4, 64)}, None, r"layers\[0\]\.k: rank 3"),
        ({"0.k": (1, 1, 4, 64)}, {"kvpack.unpacked": '{"start": "x"}'}, "its metadata kvpack.unpacked is"),
        ({"0.k": (1, 1, 4, 64)}, {"kvpack.unpacked": "{"}, "its metadata kvpack.unpacked is"),
        ({"0.k": (1, 1, 4, 64)}, {"kvpack.unpacked": '{"start": true, "model": {}}'}, "its metadata kvpack.unpacked is"),
        ({"0.k": (1, 1, 4, 64)}, {"kvpack.unpacked": "[" * 100_000}, "its metadata kvpack.unpacked is"),
        ({"9" * 5000 + ".k": (1, 1, 4, 64)}, None, "is not named"),
    ],
    ids=["name", "gap", "no tensor", "rank", "note", "note that is no JSON", "note of a boolean", "note that is too deep", "long number"],
)
def test_dense_files_that_are_refused(
    tensors: dict[str, tuple[int, ...]], metadata: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "dense.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, plain, metadata)
    assert run("pack", plain, tmp_path / "out", "--recipe", "kivi-2") == 2
    assert re.match(rf"kvpack: .*{message}", capsys.readouterr().err)


@pytest.mark.parametrize("size", [2**40, 2**63, 2**64 - 1])
def test_a_dense_file_of_more_tokens_than_there_are_numbers(size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a channel it takes no byte, and safetensors opens it."""
    plain = tmp_path / "dense.safetensors"
    header = json.dumps({"0.k": {"dtype": "F32", "shape": [1, 1, size, 0], "data_offsets": [0, 0]}}).encode()
    plain.write_bytes(len(header).to_bytes(8, "little") + header)
    assert run("pack", plain, tmp_path / "out", "--recipe", "bf16") == 2
    assert f"the tensor '0.k' has the shape [1, 1, {size}, 0], the largest size is 1099511627775" in capsys.readouterr().err


def test_a_dense_file_whose_strides_are_no_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tmp_path / "dense.safetensors"
    header = json.dumps({"0.k": {"dtype": "F32", "shape": [1, 2**31, 0, 2**39], "data_offsets": [0, 0]}}).encode()
    plain.write_bytes(len(header).to_bytes(8, "little") + header)
    assert run("pack", plain, tmp_path / "out", "--recipe", "bf16") == 2
    assert f"have the product {2**70}, the limit is {2**63 - 1}" in capsys.readouterr().err


def test_a_dense_file_that_is_no_safetensors_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tmp_path / "dense.safetensors"
    header = b'{"0.k":{"dtype":"\\u001b[31m","shape":[1,1,1,4],"data_offsets":[0,16]}}'
    for data in (b"nonsense" * 8, len(header).to_bytes(8, "little") + header + bytes(16)):
        plain.write_bytes(data)
        assert run("pack", plain, tmp_path / "out", "--recipe", "kivi-2") == 2
        message = capsys.readouterr().err
        assert message.startswith(f"kvpack: {plain}: is not a safetensors file")
        assert message.strip().isprintable(), "a terminal would obey it"


def test_version_and_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"\b0\b"):
        run("--version")
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"kvpack {kvpack.__version__}", *(f"{device}: {words}" for device, words in kvpack.backends().items())]
    for words in ([], ["frobnicate"], ["unpack", "a", "b", "--dtype", "int2"]):
        with pytest.raises(SystemExit, match="2"):
            run(*words)
        assert "usage: kvpack" in capsys.readouterr().err


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpack.file.container.File.verify", interrupted)
    assert run("verify", file) == 130
    assert capsys.readouterr().err == ""


PIPED = {
    "recipes": ["recipes"],
    "recipes as JSON": ["recipes", "--json"],
    "inspect": ["inspect", "FILE"],
    "inspect as JSON": ["inspect", "--json", "FILE"],
    "verify": ["verify", "FILE"],
    "store ls": ["store", "ls", "STORE"],
}


@pytest.mark.scenario
@pytest.mark.parametrize("words", PIPED.values(), ids=PIPED)
def test_a_reader_that_leaves(words: list[str], file: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    names = {"FILE": str(file), "STORE": str(tmp_path / "store")}
    read, write = os.pipe()
    os.close(read)
    # Python ignores SIGPIPE by itself; a shell may hand down either setting.
    process = subprocess.Popen(
        [sys.executable, "-m", "kvpack", *(names.get(word, word) for word in words)],
        stdout=write,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN),
    )
    os.close(write)
    _, err = process.communicate()
    assert (process.returncode, err) == (141, b"")


def test_a_reader_that_leaves_the_complaints(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen([sys.executable, "-m", "kvpack", "verify", str(tmp_path / "none")], stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    out, _ = process.communicate()
    assert (process.returncode, out) == (141, b"")


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("kvpack.file.container.File.verify", refuse)
    assert run("verify", file) == 3
    assert capsys.readouterr().err == "kvpack: there is not enough memory\n"


def _closed_streams() -> None:
    os.close(1)
    os.close(2)


@pytest.mark.scenario
@pytest.mark.parametrize(("command", "more"), [("verify", []), ("inspect", []), ("convert", ["out", "kivi-4"])])
def test_closed_streams(command: str, more: list[str], file: Path, tmp_path: Path) -> None:
    # Closed in the shell's way, before the interpreter starts.
    words = [sys.executable, "-m", "kvpack", command, str(file), *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(words, preexec_fn=_closed_streams, cwd=tmp_path, env=environment, check=False)
    assert run.returncode == 0
    assert (tmp_path / "out").exists() == bool(more)


def test_a_full_device_for_the_output(file: Path) -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-m", "kvpack", "inspect", file], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (run.returncode, run.stderr) == (3, "kvpack: [Errno 28] No space left on device\n")


def test_a_demo_folder_that_is_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--out", file, "--recipe", "bf16") == 3
    assert capsys.readouterr().err == f"kvpack: {file}: could not be made: File exists\n"


def test_a_progress_label_is_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("[/b] [red]\x1b", argparse.Namespace(json=False)) as callback:
        assert callback is not None
        callback(1, 2)
    assert "[/b] [red]\\x1b" in capsys.readouterr().err


def test_a_terminal_without_unicode(file: Path) -> None:
    result = in_process("inspect", file, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "")
    assert "header and padding" in result.stdout


def test_no_message_is_obeyed_by_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(arguments: object) -> int:
        raise errors.InvalidParameter("of a file: a\x01\x1b[2J\nand below")

    monkeypatch.setattr("kvpack.commands.recipes.run", refuse)
    assert run("recipes") == 2
    assert capsys.readouterr().err == "kvpack: of a file: a\\x01\\x1b[2J\nand below\n"


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2J\n\u202eb") == "a\\x1b[2J\\n\\u202eb"


def test_bench_io(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["bench", "io", "--synthetic", "2x1x2x96x64", "--repeats", "1", "--recipe", "kivi-2", "--recipe", "bf16", "--folder", tmp_path]
    threads = torch.get_num_threads()
    report = run_json(capsys, *words)
    assert torch.get_num_threads() == threads
    assert report["bf16_bytes"] == 2 * 2 * 2 * 96 * 64 * 2
    assert [(row["name"], row["operation"]) for row in report["rows"]] == [
        ("memory", "copy into memory in use"),
        *(("safetensors", operation) for operation in ("write", "read", "read, attend")),
        *((name, operation) for name in ("torch.save", "pickle", "zstd") for operation in ("write", "read")),
        *(
            (recipe, operation)
            for recipe in ("kivi-2", "bf16")
            for operation in ("encode", "save", "load", "unpack", "write", "read", "read, attend")
        ),
    ]
    by_name = {(row["name"], row["operation"]): row for row in report["rows"]}
    for row in report["rows"]:
        assert row["gb_per_s"] == pytest.approx(report["bf16_bytes"] / row["seconds"] / 1e9)
        assert row["of_copy"] == pytest.approx(by_name["memory", "copy into memory in use"]["seconds"] / row["seconds"])
        assert row["bytes"] * 16 == pytest.approx(row["bits_per_value"] * report["bf16_bytes"])
        peer = by_name.get(("safetensors", row["operation"]))
        assert row["of_safetensors"] == (None if peer is None else pytest.approx(row["seconds"] / peer["seconds"]))
    assert by_name["kivi-2", "write"]["bytes"] < report["bf16_bytes"] / 2 < by_name["bf16", "write"]["bytes"]
    assert list(tmp_path.iterdir()) == []
    assert run(*words) == 0
    assert "read, attend" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--synthetic", "2x3"], 2, "--synthetic is '2x3', expected layers x batch x heads x tokens x dim"),
        (["--synthetic", "1x1x1x32x64", "--repeats", "0"], 2, "--repeats is 0, expected an integer of at least 1"),
        (["--model", "/nowhere"], 3, "/nowhere: has no config.json"),
        (["--text", "/nowhere"], 3, "/nowhere: could not be opened as a text: No such file or directory"),
        (["--device", "cuda:99"], 2, "--device is 'cuda:99', expected 'cpu' or one of "),
    ],
    ids=["shape", "repeats", "model", "text", "device"],
)
def test_bench_io_refuses(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "io", "--recipe", "bf16", *words) == code
    assert capsys.readouterr().err.startswith(f"kvpack: {message}")
