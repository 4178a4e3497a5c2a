"""A short run of tests/support/store_endurance.py, which must detect a wrong hit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support import store_endurance, store_stress

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.scenario


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_stress, "LAYERS", (1, 8))
    monkeypatch.setattr(store_stress, "PROMPTS", 24)


def test_killed_processes_leave_a_correct_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_stress, "BUDGET", 4_000_000)
    report = store_endurance.run_endurance(str(tmp_path / "store"), 6, processes=2, kill_seconds=1)
    assert report["kills"] >= 4
    assert not store_endurance.has_failed(report), report


def test_a_wrong_hit_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_stress, "check", lambda *given: pytest.fail("wrong"))
    report = store_endurance.run_endurance(str(tmp_path / "store"), 2, processes=1, kill_seconds=5)
    assert report["wrong"] > 0
    assert store_endurance.has_failed(report)
