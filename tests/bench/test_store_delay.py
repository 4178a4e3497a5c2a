"""Tests of ``kvpack bench store --row round-trips`` with a store behind a relay that adds network delay."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest

from kvpack import cli
from kvpack.bench import store_delay, store_scale
from kvpack.errors import InvalidParameter
from support import redis_server, s3_server

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_delayed_server_calls_are_compared(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(store_delay.PAGES, kind, 8)
    with contextlib.ExitStack() as stack:
        if kind == "redis":
            pytest.importorskip("redis")
            location = stack.enter_context(redis_server.run_server(tmp_path)).url
        else:
            pytest.importorskip("obstore")
            server = stack.enter_context(s3_server.run_server())
            location = server.url
            for name, variable in s3_server.VARIABLES.items():
                monkeypatch.setenv(variable, server.options[name])
        rows = ["--row", "round-trips"] if kind == "redis" else []
        assert cli.main(["bench", "store", "--location", location, *rows, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    store_scale.show(report)
    text = capsys.readouterr().out
    assert "PageStore: put of stored pages" in text
    assert "entries of" not in text
    table = report["round_trips"]
    delay = {"redis": 5, "s3": 20}[kind]
    assert (report["put"], table["pages"], table["delay_ms"]) == (0, 8, delay)
    asked = table["requests"]
    for call, like in store_delay.COUNTERPARTS.items():
        assert asked["PageStore"][call] <= 2 * asked["Store"][like]
    if kind == "redis":
        # The touch is a request of its own.
        assert [asked["PageStore"][call] for call in ("contains", "touch", "get_into", "put of stored pages")] == [1, 1, 2, 2]
    assert set(table["ms"]["Store"]) == {"save", "match", "load", "save of stored chunks"}
    # An object store notes uses later.
    calls = [value for calls in table["ms"].values() for what, value in calls.items() if what != "touch"]
    assert all(value >= delay for value in calls)


def test_round_trips_are_in_the_default_rows_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    monkeypatch.setattr(store_scale, "ROWS", ("match", store_scale.ROUND_TRIPS))
    monkeypatch.setattr(store_scale, "LOOKUPS", 2)
    monkeypatch.setitem(store_delay.PAGES, "redis", 8)
    with redis_server.run_server(tmp_path) as server:
        report = store_scale.run(server.url, 200, delay_ms=1.0)
        assert set(report["rows"]) == {"match 10 chunks", "match 100 chunks"}
        assert report["round_trips"]["delay_ms"] == 1.0
        with pytest.raises(InvalidParameter, match="--delay is set, but it affects only round-trips: add --row round-trips"):
            store_scale.run(server.url, 200, rows=["match"], delay_ms=1.0)
    report = store_scale.run(str(tmp_path / "folder"), 200)
    assert "round_trips" not in report
    assert report["put"] == 200


@pytest.mark.parametrize(
    ("location", "ms", "message"),
    [
        ("redis://127.0.0.1:1", 0.0, "--delay is 0, expected"),
        ("/tmp/store", 5.0, "expected redis:// or s3://"),
        ("rediss://user:secret@host", 5.0, r"the location is 'rediss://\*\*\*@host'"),
        ("s3://b/p", 5.0, "AWS_ENDPOINT_URL is '', expected the http:// address"),
        ("s3://b/p", None, "AWS_ENDPOINT_URL is ''"),
    ],
)
def test_locations_without_a_server_are_refused(location: str, ms: float | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(store_delay.ENDPOINT, raising=False)
    with pytest.raises(InvalidParameter, match=message):
        store_scale.run(location, 200, rows=["round-trips"], delay_ms=ms)


@pytest.mark.parametrize("option", ["row", "delay"])
def test_location_options_require_a_location(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "store", f"--{option}", "5"]) == 2
    assert f"--{option} is set without --location" in capsys.readouterr().err
