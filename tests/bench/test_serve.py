"""kvpack bench serve: every row beside transformers' own caches, and a file that names its model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import kvpack
from kvpack.bench import serve
from kvpack.formats.errors import InvalidParameter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shapes of a device are large")


def test_rows_are_beside_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "GENERATED", {"cpu": 2})
    saved = []
    save = kvpack.save
    monkeypatch.setattr(kvpack, "save", lambda cache, path: (saved.append(cache.model), save(cache, path)))
    done: list[tuple[int, int]] = []
    report = serve.run("small", ["octopus-3"], [(2, 40)], [40], 1, str(tmp_path), str(tmp_path), lambda *now: done.append(now))
    assert done[-1] == (len(done), len(done))
    assert [row["cache"] for row in report["decode"]] == ["DynamicCache", "octopus-3"]
    assert [row["from"] for row in report["first_token"]] == ["recompute", "bf16 safetensors", "octopus-3"]
    assert all(row["eager_seconds"] > 0 and row["generate_seconds"] > 0 for row in report["decode"])
    assert saved[0]["config"]
    assert saved[0]["weights"]
    assert json.loads((tmp_path / "serve.json").read_text()) == report
    # As on a device.
    dense, packed = report["decode"]
    dense.update(eager_seconds=2.0, generate_seconds=4.0, graph_seconds=1.0)
    packed.update(eager_seconds=1.0, generate_seconds=1.0, graph_seconds=0.5)
    report["decode"].insert(
        1, {**dense, "cache": "DynamicCache, flash", "eager_seconds": 0.5, "generate_seconds": 0.5, "graph_seconds": None}
    )
    monkeypatch.setenv("COLUMNS", "200")
    serve.show(report)
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if "octopus-3" in line and "2 x 40" in line]
    assert row[5:] == ["1000.00", "0.50", "/", "2.00", "1000.00", "0.25", "/", "2.00", "1.00", "500.00", "0.50", "4"]


def test_a_shape_that_is_not_known() -> None:
    with pytest.raises(InvalidParameter, match="shape is 'large', expected one of llama-3-8b, "):
        serve.run("large", None, None, None, None, None, None)
