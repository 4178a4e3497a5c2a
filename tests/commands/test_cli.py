"""Tests of the command line: output, exit codes, and messages."""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvpack
from kvpack import cli
from kvpack.file.hidden_tokens import HiddenRange
from kvpack.file.inputs import PADDED, Inputs
from kvpack.formats import errors
from kvpack.output import printable, progress
from support import warm_python
from support.caches import random_pairs, unpack_all

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


def in_process(*words: object, code: str = "", python: str = sys.executable, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, followed by ``code``, which can read the exit code from ``exit_code``."""
    script = f"import sys\nfrom kvpack.cli import main\nexit_code = main(sys.argv[1:])\n{code}\nsys.exit(exit_code)"
    return subprocess.run([python, "-c", script, *map(str, words)], capture_output=True, text=True, check=False, **options)


def test_inspect_shows_the_contents_of_a_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = run_json(capsys, "inspect", file)
    cache = kvpack.load(file)
    assert summary["bytes"] == file.stat().st_size == cache.nbytes
    assert summary["values"] == cache.values == 3 * 2 * 2 * 100 * 64
    assert summary["bits_per_value"] == cache.bits_per_value == 8 * cache.nbytes / cache.values
    assert summary["nominal_bits"] == pytest.approx(cache.nominal_bits)
    assert (summary["start"], summary["stop"]) == (256, 356)
    assert summary["model"] == {"name": "toy", "revision": "7"}
    assert summary["recipe"] == kvpack.Recipe(RECIPE).text
    assert sum(summary["streams"].values()) == summary["bytes"]
    assert [codec["id"] for codec in summary["codecs"]] == ["raw", "group", "group"]
    side = summary["layers"][1]["k"]
    assert (side["tokens"], side["packed_tokens"], side["tail_tokens"], side["window"], side["dim"]) == (100, 96, 4, 32, 64)
    assert side["stored_bytes"] == sum(t["stored_bytes"] for t in summary["tensors"] if t["name"].startswith("1.k."))
    assert all(len(tensor["xxh3_128"]) == 32 for tensor in summary["tensors"])


def test_inspect_prints_text(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", file) == 0
    text = capsys.readouterr().out
    assert f"{file.stat().st_size:,} bytes" in text
    assert "tokens 256 to 356" in text
    assert "model toy\n  revision 7\n" in text
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["1-2", "k", "group (2)", "2", "100", "4", "64"] in [row[:7] for row in rows]
    assert "\n(2) group bits=2 axis=token size=32 raw_positions=bf16\n" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "raw tail: the newest tokens" in text
    assert not [row for row in rows if row[0].startswith(("k.", "v.")) and row[1] == "0"], "streams without bytes"
    kvpack.save(kvpack.pack(random_pairs(1, 64, batch=2), "kivi-2"), file.with_name("batch"))
    assert run("inspect", file.with_name("batch")) == 0
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.split()[1:2] == ["k"])
    assert row[2:6] == ["group", "(0)", "2", "2"]
    assert "header and padding" in {row[0] for row in rows}


def test_inspect_names_the_preset_of_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, recipe in (("preset", "octopus-3"), ("changed", "octopus-3;window=32")):
        kvpack.save(kvpack.pack(random_pairs(1, 64), recipe), tmp_path / name)
    full = kvpack.Recipe("octopus-3").text
    assert run("inspect", tmp_path / "preset") == 0
    clauses = "".join(f"  {clause}\n" for clause in full.split(";"))
    assert f"recipe octopus-3\n{clauses}model" in capsys.readouterr().out
    assert run("inspect", tmp_path / "changed") == 0
    assert f"recipe {full};tail=32\nmodel" in capsys.readouterr().out
    assert run("inspect", tmp_path / "preset", tmp_path / "changed") == 0
    assert re.search(r"preset .* octopus-3 +1 ", capsys.readouterr().out)


MODULE = '''
from dataclasses import dataclass

from kvpack.formats import CODECS, CodecFamily, Layout


@dataclass(frozen=True)
class Floats(CodecFamily):
    dim: int
    id = "acme-floats"
    nominal_bits = 32.0

    def scale_layouts(self, batch, heads, tokens):
        return {"values": Layout("F32", (batch, heads, tokens, self.dim))}

    def encode(self, x):
        return {"values": x.float()}

    def decode_digits(self, digits, streams):
        return streams["values"]


CODECS[Floats.id] = Floats
'''


def test_commands_import_a_module_with_codecs(tmp_path: Path) -> None:
    command = functools.partial(in_process, python=warm_python.python(), cwd=tmp_path)
    (tmp_path / "acme.py").write_text(MODULE)
    kvpack.save(kvpack.pack(random_pairs(2, 64), "raw"), tmp_path / "raw")
    for words in (
        ("convert", "raw", "own", "kv=acme-floats"),
        ("inspect", "own"),
        ("verify", "own"),
        ("unpack", "own", "dense.safetensors"),
        ("convert", "own", "fp8", "fp8"),
    ):
        done = command("--import", "acme", *words)
        assert done.returncode == 0, done.stderr
    bare = command("--import", "acme", "convert", "raw", "bare", "acme-floats")
    assert (bare.returncode, "write 'kv=acme-floats', or k= or v=" in bare.stderr) == (2, True)
    unknown = command("verify", "own")
    assert (unknown.returncode, "(for commands: kvpack --import MODULE ...)" in unknown.stderr) == (1, True)
    late = command("verify", "own", "--import", "acme")
    assert (late.returncode, "write it before the command: kvpack --import MODULE" in late.stderr) == (2, True)
    for name in ("acme.py", str(tmp_path / "acme.py"), "a/b", ""):
        path = command("--import", name, "verify", "own")
        assert (path.returncode, path.stderr.startswith(f"kvpack: --import is {name!r}, expected the name of a module")) == (2, True)
    missing = command("--import", "acne", "verify", "own")
    assert missing.returncode == 2
    assert missing.stderr.startswith("kvpack: --import is 'acne', which is neither in the current folder nor installed: run kvpack in ")
    assert "PYTHONPATH" in missing.stderr


def test_commands_accept_an_empty_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.kvpack"
    kvpack.save(kvpack.pack(random_pairs(1, 0), "kivi-2"), path)
    summary = run_json(capsys, "inspect", path)
    assert summary["values"] == summary["bits_per_value"] == 0
    capsys.readouterr()
    assert run("inspect", path) == run("verify", path) == 0
    assert " bytes, 1 layer, all checked\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_headers_are_read_without_torch(command: str, file: Path) -> None:
    checked = in_process(command, file, code="assert 'torch' not in sys.modules and 'transformers' not in sys.modules")
    assert (checked.returncode, checked.stderr) == (0, "")
    without = in_process(command, "--json", file, code="assert 'rich' not in sys.modules")
    assert (without.returncode, without.stderr) == (0, "")


def test_verify_checks_a_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_verify_removes_files_left_by_killed_writers(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    kept = "kept, because a process may be writing it; if none is, delete it yourself"
    assert sorted(printed[:2]) == sorted([f"{old}: {kept}", f"{held}: {kept}"])
    assert printed[2:] == [f"{folder}: 0 unfinished files removed"]
    assert run("verify", "--clean", folder) == 0
    assert f"{held}: removed, because its writer was killed" in capsys.readouterr().out.splitlines()
    assert os.listdir(folder) == [old.name]


def test_the_worst_exit_code_of_several_files_counts(file: Path, tmp_path: Path) -> None:
    """As with diff and grep, the exit code is that of the file that could not be read."""
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"nonsense")
    for order in ([damaged, tmp_path, file], [tmp_path, file, damaged]):
        assert run("verify", *order) == 3
    assert run("verify", file, damaged) == 1
    assert run("verify", file, file) == 0
    assert kvpack.errors.WORST_FIRST == (3, 2, 1, 0)
    for codes, worst in (((), 0), ((0, 1), 1), ((1, 3, 2), 3), ((2, 1), 2)):
        assert kvpack.errors.worst_exit_code(codes) == worst


def test_every_error_goes_to_standard_error() -> None:
    classes = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.KvpackError)}
    assert len(classes) >= 17
    # What only kvpack itself tells apart.
    own = {"NotConsecutive", "ValueTooLarge"}
    assert all(classes[name].__mro__[1] is errors.InvalidParameter for name in own)
    for name, kind in classes.items():
        if name in own:
            continue
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
def test_invalid_files_are_refused_by_every_command(kind: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_missing_file_is_reported(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    more = {"convert": ["out", "kivi-2"], "unpack": ["out"], "pack": ["out", "--recipe", "kivi-2"]}.get(command, [])
    assert run(command, missing, *more) == 3
    assert capsys.readouterr().err.startswith(f"kvpack: {missing}: could not be opened: No such file")


@pytest.mark.parametrize("recipe", ["kivi-5", "kv=grup:b=2", "kv=group:b=99", "kv=group:b=2,w=1"])
def test_unknown_words_in_a_recipe_are_reported(recipe: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(errors.InvalidParameter) as raised:
        kvpack.load(file).convert(recipe)
    assert run("convert", file, tmp_path / "out", recipe) == 2
    assert capsys.readouterr().err == f"kvpack: {raised.value}\n"
    assert run("demo", "--recipe", recipe) == run("bench", "io", "--recipe", recipe) == 2


def test_an_unwritable_folder_is_reported(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The output is checked before a model is loaded.
    cache = ["cache", "--model", "no/model", "--prompt-file", file, "--out"]
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.write_bytes(b"")
    kept.chmod(0o444)
    link.symlink_to(tmp_path / "no" / "out")
    for output, reason in (
        (tmp_path / "no" / "out", "no is not a folder: pass"),
        (link, "no is not a folder: pass"),
        (tmp_path, "it is not a regular file: pass"),
        ("-", "it is not a regular file: pass"),
        (kept, "the file is read-only"),
    ):
        for words in (["convert", file, output, "kivi-4"], ["unpack", file, output], [*cache, output, "--force"]):
            assert run(*words) == 3
            assert reason in capsys.readouterr().err


def test_generate_refuses_a_file_before_it_loads_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("notes", encoding="utf-8")
    assert run("generate", text, "--prompt", "Hello", "--model", "no/model") == 1
    assert f"{text}: is only 5 bytes long, not a kvpack file" in capsys.readouterr().err


def test_convert_writes_another_recipe(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.kvpack"
    report = run_json(capsys, "convert", file, out, "kivi-4", "--durable")
    assert report["bytes"] == out.stat().st_size
    assert report["bits_per_value"] == 8 * report["bytes"] / report["values"]
    converted = kvpack.load(out)
    assert converted.recipe == kvpack.Recipe("kivi-4").text
    assert (converted.start, dict(converted.model)) == (256, {"name": "toy", "revision": "7"})
    assert run("convert", file, out, "raw", "--compress", "--force") == 0
    assert f"{out}: {out.stat().st_size:,} bytes" in capsys.readouterr().out
    assert kvpack.load(out).recipe == "kv=raw"


def test_convert_refuses_an_empty_recipe(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", file, tmp_path / "out", "") == 2
    assert "recipe '': unknown word ''; expected a preset, such as kvpack-4" in capsys.readouterr().err


def test_convert_keeps_compression(tmp_path: Path) -> None:
    x = torch.randint(3, (1, 2, 300, 64), generator=torch.Generator().manual_seed(0)).float()
    kvpack.save(kvpack.pack([(x, x)], "raw"), tmp_path / "in", compress=True)
    for name, options in {"kept": (), "compressed": ("--compress",), "plain": ("--no-compress",)}.items():
        assert run("convert", tmp_path / "in", tmp_path / name, "fp8", *options) == 0
    assert (tmp_path / "kept").read_bytes() == (tmp_path / "compressed").read_bytes()
    assert (tmp_path / "plain").stat().st_size == kvpack.load(tmp_path / "kept").nbytes > (tmp_path / "kept").stat().st_size
    assert run("convert", tmp_path / "plain", tmp_path / "again", "fp8") == 0
    assert (tmp_path / "again").stat().st_size == (tmp_path / "plain").stat().st_size


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("kivi-2", "kivi-4", True),
        ("octopus-2", "raw", True),
        ("kivi-4", "kivi-2", False),
        ("raw", "kivi-4", False),
        ("bf16", "fp32", False),
    ],
)
def test_convert_says_that_more_bits_gain_nothing(
    before: str, after: str, told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, out = tmp_path / "in", tmp_path / "out"
    kvpack.save(kvpack.pack(random_pairs(2, 128), before), packed)
    assert run("convert", packed, out, after) == 0
    err = capsys.readouterr().err
    note = f"kvpack: note: {out} has more bits per value than {packed}, but no better quality: values that {before} has rounded"
    assert (note in err) == told
    assert kvpack.load(out).recipe == kvpack.Recipe(after).text


WRITING = {
    "convert": ["convert", "IN", "OUT", "kivi-2"],
    "convert by a recipe file": ["convert", "GOOD", "OUT", "@RECIPE;tail=32"],
    "unpack": ["unpack", "IN", "OUT"],
    "pack": ["pack", "DENSE", "OUT", "--recipe", "RECIPE"],
    "import": ["import", "DENSE", "OUT"],
    "export": ["export", "IN", "OUT"],
    "a basis": ["unpack", "GOOD", "OUT", "--basis", "IN"],
    "store export": ["store", "export", "STORE", "00", "OUT", "--key-file", "IN"],
    "tune": ["tune", "--bits", "3", "--out", "OUT", "--text", "IN"],
    "the measurements of tune": ["tune", "--bits", "3", "--out", "OUT", "--measurements", "IN"],
    "calibrate": ["calibrate", "--out", "OUT", "--text", "IN"],
}
"""Commands that write OUT. Some tests use the same file as the input IN, DENSE or RECIPE."""


@pytest.mark.parametrize("link", ["the same path", "a symbolic link", "a hard link"])
@pytest.mark.parametrize("words", WRITING.values(), ids=WRITING)
def test_no_command_overwrites_its_input(
    words: list[str], link: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, out = file.read_bytes(), tmp_path / "link"
    if link == "the same path":
        out = file
    elif link == "a symbolic link":
        out.symlink_to(file)
    else:
        out.hardlink_to(file)
    names = {"IN": file, "DENSE": file, "GOOD": tmp_path / "good", "OUT": out, "STORE": tmp_path / "store"}
    given = [str(names.get(word, word)).replace("RECIPE", str(file)) for word in words]
    for force in ([], ["--force"]):
        assert run(*given, *force) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err) == ("", f"kvpack: {out} is an input of this command: write to another path\n")
    assert file.read_bytes() == before
    assert out.is_symlink() == (link == "a symbolic link")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["store", "export", "FOLDER", "00", "OUT"], "ab/entry"),
        (["convert", "IN", "OUT", "kivi-2", "--basis", "FOLDER"], "good.kvbasis"),
        (["generate", "IN", "--prompt", "a", "--model", "FOLDER", "--out", "OUT"], "model-00001-of-00002.safetensors"),
        (["cache", "--prompt-file", "IN", "--model", "FOLDER", "--out", "OUT"], "config.json"),
        (["tune", "--bits", "3", "--text", "IN", "--model", "FOLDER", "--out", "OUT"], "merges.txt"),
        (["calibrate", "--text", "IN", "--model", "FOLDER", "--out", "OUT"], "tokenizer.model"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
@pytest.mark.parametrize("linked", [False, True], ids=["", "through a link"])
def test_no_command_overwrites_a_file_in_its_input_folder(
    words: list[str], name: str, linked: bool, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An output must not replace an input, because other programs may need the files of a store, a model, or a folder of bases."""
    home = tmp_path / "folder"
    precious = home / name
    precious.parent.mkdir(parents=True)
    precious.write_bytes(b"precious")
    out = tmp_path / "link" if linked else precious
    if linked:
        out.symlink_to(precious)
    names = {"IN": file, "FOLDER": home, "OUT": out}
    assert run(*[str(names.get(word, word)) for word in words], "--force") == 2
    expected = f"kvpack: {out} is in the folder {home}, which is an input of this command: write to another path\n"
    assert capsys.readouterr().err == expected
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("words", WRITING.values(), ids=WRITING)
def test_a_command_replaces_a_file_only_with_force(
    words: list[str], file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, dense_file, recipe = tmp_path / "notes.txt", tmp_path / "dense", tmp_path / "recipe"
    notes.write_text("mine")
    recipe.write_text("kivi-2")
    assert run("unpack", file, dense_file) == 0
    capsys.readouterr()
    names = {"IN": file, "DENSE": dense_file, "GOOD": file, "OUT": notes, "STORE": tmp_path / "store"}
    given = [str(names.get(word, word)).replace("RECIPE", str(recipe)) for word in words]
    assert run(*given) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"kvpack: {notes} already exists: write to another path, or replace it with --force\n")
    assert notes.read_text() == "mine"
    if words[0] in ("convert", "unpack", "pack") and "--basis" not in words:
        assert run(*given, "--force") == 0
        assert notes.read_bytes() != b"mine"


def test_every_command_that_writes_a_file_has_force() -> None:
    """Every parser with an output argument has the option ``--force``, so a new command cannot lack it by mistake."""

    def walk(parser: argparse.ArgumentParser, name: str) -> list[str]:
        found = []
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [one for word, inner in action.choices.items() for one in walk(inner, f"{name} {word}")]
        outputs = {action.dest for action in parser._actions} & {"output", "out"}
        forces = any("--force" in action.option_strings for action in parser._actions)
        return [*found, *([name] if outputs and not forces else [])]

    # These write folders of reports under names of their own.
    assert sorted(walk(cli.parser(), "")) == [" bench kernels", " bench quality", " bench serve", " demo"]


IDS = [0, 5, 2**31, 2**32 - 1, 7]


@pytest.mark.parametrize(
    ("inputs", "metadata"),
    [
        (kvpack.Inputs(torch.tensor(IDS).to(torch.uint32).numpy().tobytes(), ("an image",), (261,)), {}),
        (kvpack.Inputs(b"", ("tokens 2 to 5 came from embeddings", "an image"), (2, 40)), {"title": "a \u2603", "version": 3, "rate": 0.1}),
        (kvpack.Inputs.from_rows([bytes([5, 0, 0, 0, 6, 0, 0, 0]), bytes([0, 0, 0, 0, 6, 0, 0, 0])], (), (), 256), {}),
        (kvpack.Inputs.from_rows([b"\1\0\0\0" * 9], [(f"tokens from 256 on {PADDED}", 256)], (HiddenRange(1, 256, 260),), 256), {}),
        (kvpack.Inputs(), {}),
        (None, {"title": "x"}),
    ],
    ids=["ids", "no ids", "rows of their own", "padding", "nothing known", "nothing recorded"],
)
def test_unpack_and_pack_keep_ids_and_metadata(inputs: Any, metadata: dict[str, Any], tmp_path: Path) -> None:
    first, plain, again = tmp_path / "first", tmp_path / "plain", tmp_path / "again"
    kvpack.save(kvpack.pack(random_pairs(2, 50, batch=2), "raw", inputs=inputs, start=256), first, metadata=metadata)
    assert run("unpack", first, plain) == run("pack", plain, again, "--recipe", "raw") == 0
    tensors = load_file(plain)
    if inputs is not None and inputs.known_ids[0]:
        rows = [memoryview(row).cast("I").tolist() for row in inputs.known_ids]
        assert tensors["token_ids"].tolist() == rows
        assert rows in ([IDS], [[5, 6], [0, 6]], [[1] * 9])
    else:
        assert "token_ids" not in tensors
    packed = kvpack.load(again)
    assert packed.inputs == inputs
    assert dict(packed.metadata) == metadata
    assert first.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(1, 9, dtype=torch.int64), "token_ids has 9 ids, but the layers have 5 tokens"),
        (torch.zeros(1, 5), r"token_ids has dtype float32 and shape \[5\], expected integers"),
        (
            torch.zeros(3, 5, dtype=torch.int64),
            r"token_ids has shape \[3, 5\], but the layers have 1 sequences: store one row per sequence",
        ),
        (torch.zeros(1, 1, 5, dtype=torch.int64), r"token_ids has dtype int64 and shape \[1, 1, 5\], expected integers"),
        (torch.tensor([-1]), "token_ids ranges from -1 to -1"),
    ],
)
def test_invalid_token_ids_in_a_dense_file_are_refused(
    ids: torch.Tensor, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"0.k": torch.randn(1, 2, 5, 64), "token_ids": ids}, tmp_path / "dense")
    assert run("pack", tmp_path / "dense", tmp_path / "out", "--recipe", "raw") == 2
    assert re.match(rf"kvpack: .*dense: {message}", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_a_dense_file_keeps_token_ids_per_row_and_hidden_tokens(tmp_path: Path) -> None:
    rows = [torch.arange(5), torch.arange(2, 7)]
    told = (("tokens 0 to 4 were computed with an attention mask that hides padding", 0),)
    inputs = Inputs.from_rows([row.numpy().astype("<u4").tobytes() for row in rows], told, ((1, 0, 2),), 0)
    kvpack.save(kvpack.pack([(torch.randn(2, 2, 5, 64),) * 2], "raw", inputs=inputs), tmp_path / "file")
    assert run("unpack", tmp_path / "file", tmp_path / "dense") == 0
    assert torch.equal(load_file(tmp_path / "dense")["token_ids"], torch.stack(rows))
    assert run("pack", tmp_path / "dense", tmp_path / "again", "--recipe", "raw") == 0
    assert kvpack.load(tmp_path / "again").inputs == inputs
    save_file({"0.k": torch.randn(2, 2, 5, 64), "token_ids": torch.stack(rows)}, tmp_path / "dense")
    assert run("pack", tmp_path / "dense", tmp_path / "again", "--recipe", "raw", "--force") == 0
    found = kvpack.load(tmp_path / "again").inputs
    assert found is not None
    assert found.rows == inputs.rows
    assert not found.hidden


@pytest.mark.parametrize("hidden", [[[0, 1]], [[0, 1, "2"]], 5, [[0, -1, 2]]])
def test_hidden_tokens_of_another_form_are_refused(hidden: Any, tmp_path: Path, capsys: Any) -> None:
    note = json.dumps({"start": 0, "model": {}, "undetermined": [], "hidden": hidden})
    save_file({"0.k": torch.randn(2, 2, 5, 64)}, tmp_path / "dense", {"kvpack.unpacked": note})
    assert run("pack", tmp_path / "dense", tmp_path / "file", "--recipe", "raw") == 2
    assert "'kvpack.unpacked': 'hidden' contains" in capsys.readouterr().err


def test_token_ids_in_a_handwritten_dense_file_are_read(tmp_path: Path) -> None:
    save_file({"0.k": torch.randn(1, 2, 5, 64), "token_ids": torch.arange(3, dtype=torch.int32)}, tmp_path / "dense")
    assert run("pack", tmp_path / "dense", tmp_path / "out", "--recipe", "raw") == 0
    inputs = kvpack.load(tmp_path / "out").inputs
    assert inputs is not None
    assert memoryview(inputs.token_ids).cast("I").tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_unpack_and_pack_restore_the_cache(dtype: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert all(torch.equal(a, b) for a, b in zip(unpack_all(again), [x.float() for x in tensors.values()], strict=True))


def test_unpack_keeps_every_value_that_the_file_stores_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    k, v = torch.randn(1, 2, 50, 64, generator=torch.Generator().manual_seed(0)), torch.randn(1, 2, 50, 64).half()
    kvpack.save(kvpack.pack([(k, v)], "raw"), tmp_path / "exact")
    assert run_json(capsys, "unpack", tmp_path / "exact", tmp_path / "dense")["dtype"] == "fp16 and fp32"
    tensors = load_file(tmp_path / "dense")
    assert torch.equal(tensors["0.k"], k)
    assert torch.equal(tensors["0.v"], v)


def test_unpack_refuses_values_beyond_the_dtype(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    k = torch.full((1, 1, 5, 64), 1e6)
    kvpack.save(kvpack.pack([(k, k)], "raw"), tmp_path / "file")
    assert run("unpack", tmp_path / "file", tmp_path / "dense", "--dtype", "fp16") == 2
    assert "0.k: a value is too large for fp16: use bf16 or fp32" in capsys.readouterr().err
    assert not (tmp_path / "dense").exists()


@pytest.mark.parametrize("words", [["inspect"], ["inspect", "GOOD"], ["verify", "--clean"], ["convert", "OUT", "raw", "--force"]])
def test_control_characters_in_a_path_are_escaped(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    k = torch.zeros(1, 1, 2, 64)
    for name in ("\x1b[31m", "good"):
        kvpack.save(kvpack.pack([(k, k)], "raw"), tmp_path / name)
    command, *others = ({"GOOD": tmp_path / "good", "OUT": tmp_path / "\x1b[32m"}.get(word, word) for word in words)
    assert run(command, tmp_path / "\x1b[31m", *others) == 0
    assert run(command, tmp_path / "\x1b[33m", *others) == 3
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "\\x1b[3" in printed.out
    assert "\\x1b[33m: could not be opened" in printed.err


def test_one_sided_layers_are_packed(tmp_path: Path) -> None:
    plain, packed = tmp_path / "dense.safetensors", tmp_path / "packed.kvpack"
    save_file({"0.k": torch.randn(1, 2, 5, 64), "1.v": torch.randn(1, 2, 5, 32)}, plain)
    assert run("pack", plain, packed, "--recipe", "kivi-2") == 0
    cache = kvpack.load(packed)
    assert [list(layer.sides) for layer in cache] == [["k"], ["v"]]
    assert (cache.start, dict(cache.model)) == (0, {})


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"0.k": (1, 1, 4, 64), "past.0.value": (1, 1, 4, 64)}, None, r"the tensor name 'past\.0\.value' is unknown, expected {layer}\.k"),
        ({"0.k": (1, 1, 4, 64), "2.k": (1, 1, 4, 64)}, None, "has layer 2 but not layer 1, expected all layers from 0 to 2"),
        ({}, None, "has no layers, expected at least layer 0"),
        ({"0.k": (1, 4, 64)}, None, r"layers\[0\]\.k has shape \[1, 4, 64\]"),
        ({"0.k": ()}, None, r"layers\[0\]\.k has shape \[\]"),
        ({"0.k": (1, 1, 4, 64)}, {"kvpack.unpacked": '{"start": "x"}'}, "metadata 'kvpack.unpacked' is"),
        ({"0.k": (1, 1, 4, 64)}, {"kvpack.unpacked": "{"}, "metadata 'kvpack.unpacked' is"),
        ({"0.k": (1, 1, 4, 64)}, {"kvpack.unpacked": '{"start": true, "model": {}}'}, "metadata 'kvpack.unpacked' is"),
        ({"0.k": (1, 1, 4, 64)}, {"kvpack.unpacked": "[" * 100_000}, "metadata 'kvpack.unpacked' is"),
        ({"0.k": (1, 1, 4, 64)}, {"kvpack.unpacked": '{"start": 0, "model": {}, "metadata": 3}'}, "'kvpack.unpacked': metadata is a int"),
        ({"0.k": (1, 1, 4, 64)}, {"kvpack.unpacked": '{"start": 0, "model": {}, "undetermined": ["x"]}'}, "'undetermined' contains 'x'"),
        ({"9" * 5000 + ".k": (1, 1, 4, 64)}, None, "is unknown, expected "),
    ],
    ids=[
        "name",
        "gap",
        "no tensor",
        "rank",
        "number",
        "note",
        "note that is no JSON",
        "note of a boolean",
        "note that is too deep",
        "metadata",
        "undetermined",
        "long number",
    ],
)
def test_invalid_dense_files_are_refused(
    tensors: dict[str, tuple[int, ...]], metadata: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tmp_path / "dense.safetensors"
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, plain, metadata)
    assert run("pack", plain, tmp_path / "out", "--recipe", "kivi-2") == 2
    assert re.match(rf"kvpack: .*{message}", capsys.readouterr().err)


def test_pack_suggests_convert_for_a_kvpack_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pack", file, tmp_path / "out", "--recipe", "kivi-2") == 2
    assert "use kvpack convert" in capsys.readouterr().err


@pytest.mark.parametrize("size", [2**40, 2**63, 2**64 - 1])
def test_a_dense_file_with_more_tokens_than_values_is_refused(size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor without channels takes no bytes, whatever its number of tokens, and safetensors opens the file."""
    plain = tmp_path / "dense.safetensors"
    header = json.dumps({"0.k": {"dtype": "F32", "shape": [1, 1, size, 0], "data_offsets": [0, 0]}}).encode()
    plain.write_bytes(len(header).to_bytes(8, "little") + header)
    assert run("pack", plain, tmp_path / "out", "--recipe", "bf16") == 2
    assert f"the tensor '0.k' has shape [1, 1, {size}, 0], but each dimension may be at most 1099511627775" in capsys.readouterr().err


def test_a_dense_file_with_non_numeric_strides_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tmp_path / "dense.safetensors"
    header = json.dumps({"0.k": {"dtype": "F32", "shape": [1, 2**31, 0, 2**39], "data_offsets": [0, 0]}}).encode()
    plain.write_bytes(len(header).to_bytes(8, "little") + header)
    assert run("pack", plain, tmp_path / "out", "--recipe", "bf16") == 2
    assert f"the product of its nonzero dimensions may be at most {2**63 - 1}, not {2**70}" in capsys.readouterr().err


def test_a_dense_file_of_another_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = tmp_path / "dense.safetensors"
    header = b'{"0.k":{"dtype":"\\u001b[31m","shape":[1,1,1,4],"data_offsets":[0,16]}}'
    for data in (b"nonsense" * 8, len(header).to_bytes(8, "little") + header + bytes(16)):
        plain.write_bytes(data)
        assert run("pack", plain, tmp_path / "out", "--recipe", "kivi-2") == 2
        message = capsys.readouterr().err
        assert message.startswith(f"kvpack: {plain} is not a safetensors file")
        assert message.strip().isprintable(), "the output contains a control character"


@pytest.mark.parametrize("command", [["pack", "--recipe", "raw"], ["import"]])
def test_a_pytorch_checkpoint_is_named_in_the_error(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"0.k": torch.zeros(1, 1, 4, 64)}, tmp_path / "x.pt")
    assert run(command[0], tmp_path / "x.pt", tmp_path / "out", *command[1:]) == 2
    assert "x.pt is a zip archive, such as a PyTorch checkpoint, not a safetensors file: " in capsys.readouterr().err


def test_a_header_length_that_looks_like_a_pickle_is_read(tmp_path: Path) -> None:
    for width in range(400, 640):
        save_file({"0.k": torch.zeros(1, 1, 4, 64)}, tmp_path / "dense", {"note": "x" * width})
        if (tmp_path / "dense").read_bytes()[:2] == b"\x80\x02":
            break
    else:
        pytest.fail("no header has 640 bytes")
    assert run("pack", tmp_path / "dense", tmp_path / "out", "--recipe", "raw") == 0


def test_version_and_usage_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"\b0\b"):
        run("--version")
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"kvpack {kvpack.__version__}", *(f"{device}: {words}" for device, words in kvpack.backends().items())]
    for words in ([], ["frobnicate"], ["unpack", "a", "b", "--dtype", "int2"]):
        with pytest.raises(SystemExit, match="2"):
            run(*words)
        assert "usage: kvpack" in capsys.readouterr().err


def test_ctrl_c_ends_a_command(monkeypatch: pytest.MonkeyPatch, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpack.file.container.File.verify", interrupted)
    assert run("verify", file) == 130
    assert capsys.readouterr().err == ""


PIPED = {
    "recipes as JSON": ["recipes", "--json"],
    "inspect": ["inspect", "FILE"],
    "store ls": ["store", "ls", "STORE"],
}


@pytest.mark.scenario
@pytest.mark.parametrize("words", PIPED.values(), ids=PIPED)
def test_output_to_a_closed_pipe_ends_quietly(words: list[str], file: Path, tmp_path: Path) -> None:
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


def test_errors_to_a_closed_pipe_end_quietly(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen([sys.executable, "-m", "kvpack", "verify", str(tmp_path / "none")], stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    out, _ = process.communicate()
    assert (process.returncode, out) == (141, b"")


def test_running_out_of_memory_prints_one_line(monkeypatch: pytest.MonkeyPatch, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("kvpack.file.container.File.verify", refuse)
    assert run("verify", file) == 3
    assert capsys.readouterr().err == "kvpack: out of memory\n"


def _closed_streams() -> None:
    os.close(1)
    os.close(2)


@pytest.mark.scenario
@pytest.mark.parametrize(("command", "more"), [("verify", []), ("inspect", []), ("convert", ["out", "kivi-4"])])
def test_commands_run_with_closed_streams(command: str, more: list[str], file: Path, tmp_path: Path) -> None:
    # Closed in the shell's way, before the interpreter starts.
    words = [sys.executable, "-m", "kvpack", command, str(file), *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(words, preexec_fn=_closed_streams, cwd=tmp_path, env=environment, check=False)
    assert run.returncode == 0
    assert (tmp_path / "out").exists() == bool(more)


def test_output_to_a_full_device_is_reported(file: Path) -> None:
    with open("/dev/full", "w") as full:
        run = subprocess.run([sys.executable, "-m", "kvpack", "inspect", file], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (run.returncode, run.stderr) == (3, "kvpack: [Errno 28] No space left on device\n")


def test_a_demo_folder_that_is_a_file_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("demo", "--out", file, "--recipe", "bf16") == 3
    assert capsys.readouterr().err == f"kvpack: {file}: could not be created: File exists\n"


def test_a_progress_label_is_not_interpreted_as_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress("[/b] [red]\x1b") as callback:
        callback(1, 2)
    assert "[/b] [red]\\x1b" in capsys.readouterr().err


def test_progress_without_a_terminal_is_a_few_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr("kvpack.output.time", argparse.Namespace(monotonic=lambda: clock[0]))
    with progress("tune") as callback:
        for done in range(1, 101):
            clock[0] += 1.0
            callback(done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"tune: {n}% after 0:{n // 60:02}:{n % 60:02}" for n in (10, 15, 23, 35, 53, 80)]
    assert lines[0] == "tune: 10% after 0:00:10, about 0:01:30 left"


def test_a_terminal_without_unicode_is_supported(file: Path) -> None:
    result = in_process("inspect", file, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (result.returncode, result.stderr) == (0, "")
    assert "header and padding" in result.stdout


def test_messages_contain_no_terminal_control_sequences(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(arguments: object) -> int:
        raise errors.InvalidParameter("of a file: a\x01\x1b[2J\nand below")

    monkeypatch.setattr("kvpack.commands.recipes.run", refuse)
    assert run("recipes") == 2
    assert capsys.readouterr().err == "kvpack: of a file: a\\x01\\x1b[2J\nand below\n"


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2J\n\u202eb") == "a\\x1b[2J\\n\\u202eb"


def test_bench_io_prints_its_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["bench", "io", "--synthetic", "2x1x2x96x64", "--repeats", "1", "--recipe", "kivi-2", "--recipe", "bf16", "--folder", tmp_path]
    threads = torch.get_num_threads()
    report = run_json(capsys, *words)
    assert torch.get_num_threads() == threads
    assert report["bf16_bytes"] == 2 * 2 * 2 * 96 * 64 * 2
    assert [(row["name"], row["operation"]) for row in report["rows"]] == [
        ("memory", "copy into memory in use"),
        *(("safetensors", operation) for operation in ("write", "read", "read, attend")),
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
        (["--synthetic", "1x1x1x32x64", "--repeats", "0"], 2, "--repeats is 0, expected a positive integer"),
        (["--tokens", "64"], 2, "--tokens applies only to --model and --text"),
        (["--model", "/nowhere"], 3, "/nowhere has no config.json"),
        (["--text", "/nowhere"], 3, "/nowhere: could not be opened as a text: No such file or directory"),
    ],
    ids=["shape", "repeats", "tokens", "model", "text"],
)
def test_bench_io_refuses_invalid_arguments(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "io", "--recipe", "bf16", *words) == code
    assert capsys.readouterr().err.startswith(f"kvpack: {message}")
