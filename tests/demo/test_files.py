"""Tests of the demo: a complete run of one recipe, and what its reader process may do."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack import cli
from kvpack.demo import files as demo
from kvpack.models import demo_text
from support import warm_python

if TYPE_CHECKING:
    from pathlib import Path

RECIPE = "kv=group:b=8,g=32"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def report(folder: Path) -> Any:
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm_python.python(*warm_python.MODELS))
        result = demo.run([RECIPE], str(folder), progress=lambda done, total: steps.append((done, total)))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    return result


def test_the_demo_shows_the_recommended_recipes() -> None:
    assert {"kvpack-4", "kvpack-3", "kvpack-2"} <= set(demo.RECIPES)


def test_the_demos_text_has_five_keys() -> None:
    text = demo_text()
    assert len(text) == 2500
    assert text[:2000].count(b"\n[[key ") == 5
    assert b"[[key " not in text[2000:]


def test_the_uncompressed_model_answers_correctly_for_every_key(report: Any) -> None:
    plain = report["uncompressed"]
    assert plain["right"] == plain["asked"] == 5
    assert 1.5 < plain["byte_perplexity"] < 2


def test_the_reader_needs_only_the_file(report: Any, folder: Path) -> None:
    (row,) = report["files"]
    assert row["right"] == row["asked"] == 5
    assert row["answers"][0]["answer"] == row["answers"][0]["value"] == "DP3EIW8U"
    assert row["byte_perplexity"] == pytest.approx(report["uncompressed"]["byte_perplexity"], abs=0.01)
    assert 0.9999 < row["k_cosine"] < 1
    assert 0.9999 < row["v_cosine"] < 1
    (path,) = folder.iterdir()
    cache = kvpack.load(path)
    assert row["file"] == str(path)
    assert row["bytes"] == path.stat().st_size
    assert row["bits_per_value"] == cache.bits_per_value > row["nominal_bits"] == 8
    assert row["bf16_ratio"] == pytest.approx(16 / cache.bits_per_value)
    assert cache.tokens == report["prompt_tokens"] == 2000


def test_nothing_is_unpacked(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("the reader unpacked a layer")

    for owner in (kvpack.Layer, kvpack.Side):
        monkeypatch.setattr(owner, "unpack", refused)
    monkeypatch.setattr(demo, "SAMPLE_BYTES", 4)
    read = demo.read(report["files"][0]["file"])
    assert read["byte_perplexity"] == pytest.approx(report["files"][0]["byte_perplexity"], rel=1e-4)


def test_the_table_lists_every_row(report: Any, capsys: pytest.CaptureFixture[str]) -> None:
    demo.show(report)
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.strip().startswith(RECIPE))
    assert f"{report['files'][0]['bytes']:,}" in row
    assert "DP3EIW8U right" in row
    assert "5 of 5" in row
    assert repr(report["files"][0]["sample"]) in text
    assert f"reading processes: {kvpack.backends()['cpu']}\n" in text


def test_the_command_prints_and_saves_the_report(report: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def run(recipes: list[str], out: str | None, **_: object) -> Any:
        asked.append((recipes, out))
        return report

    monkeypatch.setattr(demo, "run", run)
    assert cli.main(["demo", "--json", "--out", "x"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert cli.main(["demo", "--recipe", "kivi-2"]) == 0
    assert asked == [(list(demo.RECIPES), "x"), (["kivi-2"], None)]


def test_a_failing_reader_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(pairs: object, recipe: str, path: Path) -> dict[str, Any]:
        path.write_bytes(b"nonsense")
        return {"file": str(path)}

    monkeypatch.setattr(demo, "write", write)
    monkeypatch.setattr(demo, "prefill", lambda prompt: [])
    monkeypatch.setattr(demo, "continue_from", lambda past: {})
    monkeypatch.setattr(sys, "executable", warm_python.python(*warm_python.MODELS))
    with pytest.raises(kvpack.KvpackError, match=r"failed: kvpack\.formats\.errors\.NotKvpack"):
        demo.run(["bf16"], str(tmp_path))
