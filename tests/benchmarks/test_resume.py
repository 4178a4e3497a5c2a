"""Tests of the benchmark that compares resuming hybrid and sliding-window models from a store with computing the prompt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import resume
from benchmarks.__main__ import main
from kvpack.formats.errors import InvalidParameter
from support.hub_cache import go_offline

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="shapes for GPUs are too large for the CPU")


@pytest.mark.scenario
def test_hybrid_and_sliding_window_models_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["resume", "--prefix", "768", "--every", "256", "--recipe", "bf16", "--recipe", "octopus-3"]
    assert main([*given, "--folder", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {(row["shape"], row["from"]): row for row in report["rows"]}
    assert list(rows) == [(shape, name) for shape in resume.SHAPES["cpu"] for name in ("computing", "bf16", "octopus-3")]
    assert all(row["error"] is None and row["seconds"] > 0 for row in rows.values())
    # 3 layers of 4 value heads, of which the states are float32 and the last 3 inputs of a convolution over 256 channels bf16.
    states = 3 * (4 * 32 * 32 * 4 + 256 * 4 * 2)
    hybrid, sliding = rows["small-hybrid", "bf16"], rows["small-sliding", "bf16"]
    assert hybrid["state_bytes_per_token"] == states * 3 / 768
    assert sliding["state_bytes_per_token"] == 0
    token = 2 * 2 * 64 * 2
    assert hybrid["loaded_bytes"] == pytest.approx(token * 768 + states, rel=0.02)
    # Five layers of six have a window of 128 tokens, which the last chunk of 256 holds.
    assert sliding["loaded_bytes"] == pytest.approx(token * (768 + 5 * 256), rel=0.02)
    assert sliding["bytes_per_token"] == pytest.approx(6 * token, rel=0.05)
    assert rows["small-sliding", "octopus-3"]["bytes_per_token"] < sliding["bytes_per_token"] / 3
    # What transformers' own cache holds: one layer's keys and values, and the last states.
    assert rows["small-hybrid", "computing"]["bytes_per_token"] == pytest.approx(token + states / 800, rel=0.02)
    assert not list(tmp_path.iterdir())


def test_the_table_shows_speeds_and_errors(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table shows each speed relative to computing the prompt, and one line per error."""
    row = {"shape": "large", "layers": 2, "dtype": "bfloat16", "tokens": 1024, "suffix": 32, "error": None}
    hit = {"load_seconds": 0.25, "bytes_per_token": 1000.0, "state_bytes_per_token": 10.0, "loaded_bytes": 5000}
    rows = [
        {**row, "from": "computing", "seconds": 2.0, "bytes_per_token": 2048.0},
        {**row, **hit, "from": "bf16", "seconds": 0.5, "prefill_seconds": 3.0, "save_seconds": 1.0},
        {**row, **hit, "from": "octopus-3", "seconds": None, "error": "ValueError: no kernel"},
    ]
    monkeypatch.setenv("COLUMNS", "240")
    resume.show({"device": "a device", "every": 256, "missing_kernels": ["causal_conv1d"], "rows": rows})
    printed = capsys.readouterr().out
    (line,) = [line.split() for line in printed.splitlines() if "bf16 " in line]
    assert line == ["1,024", "+", "32", "bf16", "250.0", "500.0", "0.250", "1,000", "10", "5,000", "3.0", "1.0"]
    assert "large, 1,024 + 32, octopus-3: ValueError: no kernel" in printed
    assert "Cannot be imported: causal_conv1d;" in printed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefixes": [100]}, "a prefix has 100 tokens, expected a multiple of 256"),
        ({"dtype": "float32"}, "dtype is 'float32', expected one of bf16, fp16, fp32"),
        ({"shapes": ["large"]}, "shape is 'large', expected one of llama-3-8b"),
    ],
)
def test_useless_settings_are_refused(
    given: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_offline(tmp_path, monkeypatch)
    with pytest.raises(InvalidParameter, match=message):
        resume.run(**given)  # type: ignore[arg-type]
