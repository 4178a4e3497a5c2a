"""Tests of the store's demo: processes find what another one has computed, and all generate the same tokens."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

import kvpack
from kvpack import cli
from kvpack.demo import store as demo
from kvpack.formats.errors import InvalidParameter
from support import warm_python

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _warm_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python.python(*warm_python.MODELS))


def test_the_processes_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "PROCESSES", ("A", "B"))
    assert cli.main(["store", "demo", str(tmp_path / "store"), "--recipe", "kivi-4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    first, second = report["processes"]
    assert (first["found"], second["found"], first["prompt"]) == (0, 1792, 2000)
    assert first["tokens"] == second["tokens"]
    assert len(first["tokens"]) == demo.NEW_TOKENS
    demo.show(report)
    text = capsys.readouterr().out
    assert "1,792" in text
    assert "all produce the same tokens" in text


def test_different_results_and_failures_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": 9, "found": 0, "first_token_ms": 1.0}
    report: dict[str, Any] = {"store": "s", "recipe": "r", "processes": [{"process": "A", **row, "tokens": [65]}], "same": False}
    monkeypatch.setattr(demo, "run", lambda *_, **__: report)
    assert cli.main(["store", "demo", "s"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", warm_python.python(*warm_python.MODELS))
    with pytest.raises(InvalidParameter):
        demo.run("/nowhere", "no-such-recipe")
    with pytest.raises(kvpack.KvpackError, match=r"process A failed: .*the prefix could not be stored .*put"):
        demo.run("/proc/store", "bf16")
