"""Tests of ``kvpack bench io --cold``, which compares each loading method with the speed that fio measures."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from kvpack import cli
from kvpack.bench import io_cold
from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from pathlib import Path

FIO = """#!/bin/sh
echo "$@" >> "$0.calls"
echo '{"jobs": [{"read": {"io_bytes": 4000000, "bw_bytes": 1000000}}]}'
"""


def measured(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    given = ["bench", "io", "--cold", "--synthetic", "2x1x2x64x64", "--repeats", "1", "--recipe", "octopus-3", "--folder", str(folder)]
    assert cli.main([*given, "--json"]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)["cold_rows"]
    return rows


def test_the_table_has_rows_for_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    dropped: list[str] = []
    monkeypatch.setattr(io_cold, "drop_from_page_cache", dropped.append)
    fio = tmp_path / "fio"
    fio.write_text(FIO)
    fio.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    rows = measured(tmp_path, capsys)
    assert [row["way"] for row in rows] == [io_cold.DISK, io_cold.LOAD, io_cold.COPY, io_cold.STAGED_READ, io_cold.WARM_LOAD]
    assert rows[0]["seconds"] == 4.0
    assert all(row["of_fio"] == pytest.approx(4.0 / row["seconds"]) for row in rows)
    assert len(dropped) == 4
    (call,) = (tmp_path / "fio.calls").read_text().splitlines()
    assert "--direct=1" in call.split()
    assert f"--filename={dropped[0]}" in call.split()
    fio.write_text("#!/bin/sh\necho no engine >&2\nexit 1\n")
    assert cli.main(["bench", "io", "--cold", "--synthetic", "1x1x1x64x64", "--repeats", "1", "--folder", str(tmp_path)]) != 0
    assert "no engine" in capsys.readouterr().err


def test_the_measurement_works_without_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(io_cold, "drop_from_page_cache", lambda _: None)
    monkeypatch.setattr(io_cold.shutil, "which", lambda _: None)
    rows = measured(tmp_path, capsys)
    assert [row["of_fio"] for row in rows] == [None] * 4
    io_cold.show({"source": "values", "repeats": 1, "cold_rows": rows})
    assert "fio is not installed" in capsys.readouterr().out


def test_a_file_that_stays_in_the_page_cache_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(10_000))
    monkeypatch.setattr(io_cold, "is_cold", lambda *_: False)
    with pytest.raises(InvalidParameter, match="stay in memory, so cold reads cannot be timed"):
        io_cold.drop_from_page_cache(str(tmp_path / "a"))
