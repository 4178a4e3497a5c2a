"""Tests of recipe files: their names, their contents, and error messages that name the line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kvpack
from kvpack import cli
from kvpack.coding.recipes import Recipe, parse_recipe
from kvpack.formats.errors import InvalidParameter, MissingFile

TEXT = """\ufeff# found for a small model
k=group:b=2   # coarse keys

  v=group:b=4,g=32; layers=0-1,-1:k=raw:dtype=fp32;\r
"""
CLAUSES = "k=group:b=2;v=group:b=4;layers=0-1,-1:k=raw:dtype=fp32"
"""The canonical text of the recipe in the file."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tuned.txt").write_text(TEXT)
    return tmp_path


def values(layers: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(1, 1, 40, 64, generator=generator), torch.randn(1, 1, 40, 64, generator=generator)) for _ in range(layers)]


def test_a_recipe_file_may_be_named_in_any_notation(folder: Path) -> None:
    (folder / "tuned").write_text(TEXT)
    (folder / "a=b").write_text(TEXT)
    for recipe in ("@tuned.txt", "tuned.txt", " tuned.txt ", "./tuned", "tuned", str(folder / "tuned.txt"), "@a=b", Path("a=b")):
        assert parse_recipe(recipe).text == CLAUSES
    assert parse_recipe("@tuned.txt;tail=32").text == f"{CLAUSES};tail=32"


def test_a_preset_name_is_never_read_as_a_file(folder: Path) -> None:
    for name in ("octopus-3", "kv=raw", "bf16;tail=32"):
        (folder / name).write_text("kv=group:b=1")
        assert parse_recipe(name).text == Recipe(name).text != "kv=group:b=1"
    assert parse_recipe("@octopus-3").text == "kv=group:b=1"


def test_pack_and_convert_store_the_clauses(folder: Path) -> None:
    packed = kvpack.pack(values(), "@tuned.txt")
    assert packed.recipe == kvpack.pack(values(), Path("tuned.txt")).recipe == CLAUSES
    assert [layer.k.codec.id for layer in packed] == ["raw", "raw", "group", "raw"]
    assert kvpack.pack(values(), "octopus-3").convert(Path("tuned.txt")).recipe == CLAUSES


@pytest.mark.scenario
def test_every_command_accepts_a_recipe_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = values()
    save_file({f"{number}.{side}": x for number, pair in enumerate(pairs) for side, x in zip("kv", pair, strict=True)}, "in.safetensors")
    assert cli.main(["pack", "in.safetensors", "a.kvpack", "--recipe", "tuned.txt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == CLAUSES
    assert cli.main(["convert", "a.kvpack", "b.kvpack", "@tuned.txt;tail=32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == f"{CLAUSES};tail=32"
    assert cli.main(["bench", "io", "--synthetic", "4x1x1x32x64", "--recipe", "@tuned.txt", "--repeats", "1", "--json"]) == 0
    assert "tuned.txt" in capsys.readouterr().out
    sizes = ["--tokens", "32", "--score", "8", "--windows", "1", "--needles", "0", "--generate", "0"]
    assert cli.main(["bench", "quality", "--model", "demo", *sizes, "--recipe", "@tuned.txt", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipes"][0]["recipe"] == "@tuned.txt"
    (folder / "bad.txt").write_text("k=raw")
    assert cli.main(["pack", "in.safetensors", "c.kvpack", "--recipe", "bad.txt"]) == 2
    assert cli.main(["pack", "in.safetensors", "c.kvpack", "--recipe", "none.txt"]) == 3
    assert not (folder / "c.kvpack").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# a\nkivi-2\nk=grp:b=3", r"^bad\.txt, line 3: unknown codec 'grp'.*\(did you mean group\?\)\n  k=grp:b=3\n    \^\^\^$"),
        ("kivi-2;k=grp:b=3", r"^bad\.txt, line 1: unknown codec 'grp'"),
        (
            "k=group:b=2\nv=group:b=2\nk=group:b=2,z=1",
            r"^bad\.txt, line 3: .*no option 'z'(?s:.*)\n  k=group:b=2,z=1\n              \^\^\^$",
        ),
        ("tail=33\nkivi-2", r"^bad\.txt, line 1: tail=33 must be a multiple of 32"),
        ("k=group:b=2\n", r"^bad\.txt: recipe 'k=group:b=2' has no codec for values"),
        ("\n# nothing\n ; \n", r"^bad\.txt is a recipe file without clauses"),
        ("kivi-2\n@tuned.txt", r"^bad\.txt, line 2: '@tuned\.txt': a recipe file cannot include another: copy its clauses"),
        ("int-4-med3:@tuned.txt", r"^bad\.txt, line 1: 'int-4-med3:@tuned\.txt': a recipe file cannot include another: copy its clauses"),
        ("kivi-2\n#" + "x" * 65536, r"^bad\.txt: exceeds the maximum of 65536 bytes"),
        (b"kivi-2\xff", r"^bad\.txt: byte 6 is not valid UTF-8"),
    ],
    ids=["codec", "one line", "option", "tail", "a side", "empty", "nested", "nested after an option", "large", "bytes"],
)
def test_an_error_names_the_line(folder: Path, text: str | bytes, message: str) -> None:
    (folder / "bad.txt").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(InvalidParameter, match=message):
        parse_recipe("bad.txt")


def test_an_error_in_an_added_clause_is_named(folder: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"^tuned\.txt: unknown word 'q'"):
        parse_recipe("@tuned.txt;q=raw")


@pytest.mark.parametrize("name", ["@none.txt", "none.txt", "no/such", "@", "@a\0b", Path("none")], ids=repr)
def test_a_missing_file_is_refused(folder: Path, name: str | Path) -> None:
    with pytest.raises(MissingFile, match="could not be opened as a recipe file: "):
        parse_recipe(name)


def test_a_file_that_is_not_regular_is_refused(folder: Path) -> None:
    os.mkfifo(folder / "pipe.txt")
    (folder / "folder.txt").mkdir()
    for name, kind in (("pipe.txt", "a FIFO"), ("folder.txt", "a folder")):
        with pytest.raises(MissingFile, match=f"{name}: is {kind}, expected a recipe file"):
            parse_recipe(name)


def test_a_recipe_that_does_not_fit_in_a_header_is_refused(folder: Path) -> None:
    (folder / "long.txt").write_text("kivi-2\n" + "".join(f"layers={number}:k=scalar:b=2,seed={number + 1}\n" for number in range(200)))
    for pack in (lambda: kvpack.pack(values(), "long.txt"), lambda: kvpack.pack(values(), "kivi-2").convert("long.txt")):
        with pytest.raises(InvalidParameter, match=r"recipe has \d+ bytes, but the maximum is 4096"):
            pack()
