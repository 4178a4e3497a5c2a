"""Tests of the round-trip fuzzer: a short run, and the report of a failure."""

from __future__ import annotations

import sys

import pytest

from fuzz import roundtrip
from kvpack.formats import CODECS
from support.strategies import CASES


def test_every_codec_has_a_row() -> None:
    assert set(CODECS) <= set(CASES)


@pytest.mark.scenario
@pytest.mark.parametrize("codec_id", sorted(CODECS))
def test_batch_of_every_codec(codec_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests of each codec run more of the same examples.
    monkeypatch.setattr(roundtrip, "EXAMPLES_AT_A_TIME", 8)
    report = roundtrip.run(0, codec_id, 1)
    assert report.failures == []
    assert report.examples[codec_id] > 0
    assert report.slowest_seconds > 0


def test_a_failure_is_reported_with_a_seed_that_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(codec: object, x: object) -> bool:
        raise AssertionError("an error is above its bound")

    monkeypatch.setattr(roundtrip, "check_round_trip", broken)
    monkeypatch.setattr(sys, "argv", ["roundtrip.py", "--seconds", "0", "--codec", "raw", "--seed", "42"])
    assert roundtrip.main() == 1
    printed = capsys.readouterr().out
    assert "failures: 1" in printed
    assert "--seed 42:" in printed
    assert "an error is above its bound" in printed
