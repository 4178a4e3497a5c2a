"""Tests of unknown words on the command line, of exit codes, and of commands that accept several files or recipes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack import cli
from support.caches import random_pairs

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]


def run(*words: object) -> int:
    return cli.main([str(word) for word in words])


def complaint(capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> str:
    with pytest.raises(SystemExit, match="2"):
        run(*words)
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "command", "message"),
    [
        (["inspct", "x"], "", "(did you mean inspect?)"),
        (["store", "lst", "x"], "store", "(did you mean ls?)"),
        (["bench", "qualty"], "bench", "(did you mean quality?)"),
        (["--vrsion"], "", "unknown option --vrsion; did you mean --version?"),
        (["inspect", "--jsn", "x"], "inspect", "unknown option --jsn; did you mean --json?"),
        (["inspect", "x", "--jsn"], "inspect", "unknown option --jsn; did you mean --json?"),
        (["inspect", "--xyzzy", "x"], "inspect", "unknown option --xyzzy"),
        (["generate", "x", "--promt=y z"], "generate", "unknown option --promt; did you mean --prompt?"),
        (["generate", "x", "--promt", "y"], "generate", "unknown option --promt; did you mean --prompt?"),
        (["cache", "--modle", "M", "--prompt-file", "x", "--out", "y"], "cache", "unknown option --modle; did you mean --model?"),
        (["cache", "--model", "M", "--prompt", "x", "--out", "y"], "cache", "pass --prompt-file FILE, or --prompt-file -"),
        (["export", "x", "y", "--format", "llama.cpp"], "export", "unknown option --format; --to names the program that will read it"),
        (["store", "gc", "x", "--max-byts", "1"], "store gc", "unknown option --max-byts; did you mean --max-bytes?"),
        (["recipes", "--head-dim", "64"], "recipes", "unknown option --head-dim; did you mean --dim?"),
        (["generate", "x", "--tokens", "20"], "generate", "unknown option --tokens; did you mean --max-tokens?"),
        (["bench", "quality", "--recip", "x"], "bench quality", "unknown option --recip; did you mean --recipe?"),
    ],
)
def test_similar_words_are_suggested_for_unknown_ones(
    words: list[str], command: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(*words)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].endswith(message)
    assert lines[0].startswith(" ".join(["usage: kvpack", command]).rstrip() + " [-h]")


@pytest.mark.parametrize(
    "words",
    [["frobnicate"], ["convert", "a"], ["recipes", "--max-bytes", "1GB"], ["inspect", "x", "--", "--jsn"], ["inspect", "--two words"], []],
)
def test_dissimilar_words_are_not_suggested(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if words[:1] == ["inspect"]:
        assert run(*words) == 3
        assert "did you mean" not in capsys.readouterr().err
    else:
        assert "did you mean" not in complaint(capsys, words)


@pytest.mark.parametrize("words", [["generate", "x", "--prompt", "y"], ["calibrate"], ["tune", "--bits", "3"], ["bench", "quality"]])
def test_seeds_that_pytorch_cannot_use_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument --seed: -9999999999999999999 must be less than 2**62" in complaint(capsys, [*words, "--seed=-9999999999999999999"])
    assert "argument --seed: 'x' is not an integer" in complaint(capsys, [*words, "--seed", "x"])


@pytest.mark.parametrize("word", ["\x1b[31m", "--\x1b[31m"])
def test_control_characters_in_words_are_escaped(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = complaint(capsys, ["convert", "a", "b", "raw", word])
    assert "\x1b" not in text
    assert "\\x1b[31m" in text


def test_suggestions_include_words_registered_in_the_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kvpack", "inspct"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "(did you mean inspect?)" in capsys.readouterr().err


def test_exit_codes_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"\b0\b"):
        run("--help")
    helped = dict(re.findall(r"^  (\d+) +(.+)$", capsys.readouterr().out, re.MULTILINE))
    guide = (ROOT / "kvpack" / "guides" / "command-line.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| (\d+) \| (.+) \|$", guide, re.MULTILINE)) == helped
    named = [getattr(kvpack, name) for name in kvpack.__all__]
    raised = {error.exit_code for error in named if isinstance(error, type) and issubclass(error, kvpack.KvpackError)}
    assert {0, *raised, cli.SYSTEM_REFUSED, cli.INTERRUPTED, cli.BROKEN_PIPE} == set(map(int, helped))


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.kvpack", tmp_path / "b.kvpack"]
    for path, recipe, tokens in zip(paths, ("octopus-4", "kivi-2"), (64, 128), strict=True):
        kvpack.save(kvpack.pack(random_pairs(3, tokens), recipe, model={"name": path.stem * 3}), path)
    return paths


def test_several_files_are_inspected(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", *two) == 0
    output = capsys.readouterr().out
    rows = [re.split(r" {2,}", line.strip()) for line in output.splitlines()]
    for path, recipe, tokens in zip(two, ("octopus-4", "kivi-2"), ("64", "128"), strict=True):
        cache = kvpack.load(path)
        found = [str(path), path.stem * 3, recipe, "3", tokens, f"{cache.bits_per_value:.3f}", f"{cache.nbytes:,}"]
        assert found in rows
    assert run("inspect", *two, "--json") == 0
    found: Any = json.loads(capsys.readouterr().out)
    assert run("inspect", two[0], "--json") == 0
    assert found[0] == json.loads(capsys.readouterr().out)
    assert found[1]["file"] == str(two[1])
    (tmp_path / "c.kvpack").write_bytes(b"junk")
    assert run("inspect", two[0], tmp_path / "c.kvpack", two[1]) == 1
    output = capsys.readouterr()
    assert "c.kvpack" in output.err
    assert "2 files" in output.out
    assert run("inspect", tmp_path / "c.kvpack", tmp_path / "none") == 3


@pytest.mark.parametrize("command", cli.EXAMPLES)
def test_help_ends_with_an_example_that_parses(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parser().parse_args([*command.split(), "--help"])
    example = capsys.readouterr().out.splitlines()[-1]
    assert callable(cli.parser().parse_args(shlex.split(example)[1:]).run)


def test_convert_accepts_recipes_like_other_commands(two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", "--recipe", "octopus-2", two[0], tmp_path / "1") == 0
    assert run("convert", two[0], tmp_path / "2", "--recipe=octopus-2") == 0
    assert run("convert", two[0], tmp_path / "3", "octopus-2") == 0
    assert len({(tmp_path / name).read_bytes() for name in "123"}) == 1
    assert "not allowed with argument RECIPE" in complaint(capsys, ["convert", "a", "b", "octopus-2", "--recipe", "octopus-3"])
    assert "one of the arguments RECIPE --recipe is required" in complaint(capsys, ["convert", "a", "b"])
