"""Tests of the benchmark of the JavaScript reader."""

from __future__ import annotations

import json

import pytest

from benchmarks import viewer
from benchmarks.__main__ import main
from support.reader_programs import missing_reason


@pytest.mark.scenario
def test_the_report_has_its_table(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := missing_reason("javascript"):
        pytest.skip(reason)
    assert main(["viewer", "--tokens", "64", "--recipe", "fp8", "--recipe", "klt-4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["tokens"], list(report["seconds"])) == (64, ["fp8", "klt-4"])
    assert all(times[part] > 0 for times in report["seconds"].values() for part in ("open", "k", "v"))
    viewer.show(report)
    assert "seconds of one core for a layer of 64 tokens of 8 heads of 128 channels" in capsys.readouterr().out


def test_slow_recipes_are_named() -> None:
    times = {"open": 0.1, "k": 1.0, "v": 2.0}
    assert viewer.slow({"seconds": {"x": times, "y": times | {"k": 11.0}, "z": times | {"v": 10.5}}}) == ["y", "z"]
