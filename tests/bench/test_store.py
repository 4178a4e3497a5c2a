"""Tests of ``kvpack bench store``: a small run and its report."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from kvpack import cli
from kvpack.bench import store, store_scale
from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MATCHED_TOKENS", 1024)


@pytest.mark.usefixtures("_small")
def test_a_small_run_reports_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--layers", "2", "--chunks", "2", "--repeats", "2", "--folder", str(tmp_path)]
    assert cli.main(["bench", "store", "--recipe", "kivi-4", "--json", *words]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (report["match"]["tokens"], report["match"]["chunks"]) == (1024, 4)
    load = report["load"]
    assert load["tokens"] == 512
    # 4-bit codes and a scale and a center for 32 values, against 16 bits; the rest is the header.
    assert load["safetensors_bytes_per_token"] > 2 * 8 * 128 * 2 * 2
    assert 5 / 16 < load["bytes_per_token"] / load["safetensors_bytes_per_token"] < 5.5 / 16
    assert [row["name"] for row in load["rows"]][:2] == ["load", "read and digest"]
    assert all(row["seconds"] > 0 for row in load["rows"])
    assert list(tmp_path.iterdir()) == []
    store.show(report)
    text = capsys.readouterr().out
    assert "at most 5 ms" in text
    assert "at least 0.8 x" in text
    report["match"]["ms"] = 50.0
    store.show(report)
    assert "missed" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["layers", "chunks", "repeats"])
def test_useless_numbers_are_refused(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"--{name} is 0"):
        store.run(**{name: 0})


@pytest.mark.scenario
def test_a_location_is_filled_and_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOOKUPS", 2), ("SAVES", 4), ("PROCESSES", 2)):
        monkeypatch.setattr(store_scale, name, value)
    rows = [word for row in ("match", "load", "stats", "save", "processes", "collect", "stat") for word in ("--row", row)]
    words = ["bench", "store", "--location", str(tmp_path), "--entries", "300", "--json"]
    assert cli.main([*words, *rows]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["put"] == report["entries"] == 300
    assert set(report["rows"]) >= {"match 100 chunks", "load 10 chunks", "stats", "collect", "kvpack store stat"}
    assert all(value > 0 or "not stored" in name for name, value in report["rows"].items())
    # They stay, and a second run goes on from there.
    assert cli.main([*words, "--row", "match"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["put"] < 300
    store_scale.show(report)
    assert "at most 50 ms" in capsys.readouterr().out
    assert cli.main([*words, "--row", "match", "--recipe", "fp8"]) == 2
    assert "use an empty location, or the recipe that it was filled with" in capsys.readouterr().err


def test_unknown_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="--row is 'x', expected one of match"):
        store_scale.run(str(tmp_path), 200, rows=["x"])
    with pytest.raises(InvalidParameter, match="--recipe is 'octopus-3', which cannot encode a chunk of 16 tokens: use bf16"):
        store_scale.run(str(tmp_path), 200, "octopus-3")
    with pytest.raises(InvalidParameter, match="--entries is 10"):
        store_scale.run(str(tmp_path), 10)
    with pytest.raises(InvalidParameter, match="unknown word 'octpus-3'"):
        store_scale.run(str(tmp_path), 200, "octpus-3")


@pytest.mark.parametrize(("option", "value"), [("--row", "match"), ("--entries", "300")])
def test_rows_and_entries_require_a_location(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "store", option, value]) == 2
    assert f"{option} is set without --location" in capsys.readouterr().err
