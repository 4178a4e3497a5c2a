"""Calls of stores on a distant server, whose distance a relay stands for."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import delay
from benchmarks.__main__ import main
from kvpack.errors import InvalidParameter
from support import redis_server, s3_server

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_calls_of_a_distant_server_are_compared(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(delay.PAGES, kind, 8)
    with contextlib.ExitStack() as stack:
        if kind == "redis":
            pytest.importorskip("redis")
            location = stack.enter_context(redis_server.running(tmp_path)).url
        else:
            pytest.importorskip("obstore")
            server = stack.enter_context(s3_server.running())
            location = server.url
            for name, variable in s3_server.VARIABLES.items():
                monkeypatch.setenv(variable, server.options[name])
        assert main(["delay", location, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        delay.show(report)
    assert "PageStore: put what is there" in capsys.readouterr().out
    assert report["pages"] == 8
    asked = report["requests"]
    for call, like in delay.LIKE.items():
        assert asked["PageStore"][call] <= 2 * asked["Store"][like]
    if kind == "redis":
        # The touch is a request of its own.
        assert [asked["PageStore"][call] for call in ("present", "touch", "get_into", "put what is there")] == [1, 1, 2, 2]
    assert set(report["ms"]["Store"]) == {"save", "match", "load", "save what is there"}
    # An object store notes uses later.
    calls = [value for calls in report["ms"].values() for what, value in calls.items() if what != "touch"]
    assert all(value >= 20 for value in calls)


@pytest.mark.parametrize(
    ("location", "ms", "message"),
    [
        ("redis://127.0.0.1:1", 0, "the delay is 0"),
        ("/tmp/store", 5, "expected redis:// or s3://"),
        ("s3://b/p", 5, "needs its http"),
    ],
)
def test_what_has_no_distance_is_refused(location: str, ms: float, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(delay.ENDPOINT, raising=False)
    with pytest.raises(InvalidParameter, match=message):
        delay.run(location, ms)
