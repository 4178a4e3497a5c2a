"""Tests of the benchmark for digests of a model's weights."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import weights
from benchmarks.__main__ import main
from kvpack.formats.errors import InvalidParameter


def test_the_report_has_its_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "--repeats", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"] == "tinylm"
    assert set(report["seconds"]) == {"digest", "name", "decode_step", "prefill", "prefill_and_digest"}
    assert min(report["seconds"].values()) > 0
    assert report["bytes_per_second"] == report["bytes"] / report["seconds"]["digest"]
    rates, seconds = report["checkpoint"]["bytes_per_second"], report["checkpoint"]["extrapolated"]
    assert all(seconds[name] * rates[name] == pytest.approx(weights.LARGE) for name in ("cold", "cached"))
    weights.show(report)
    printed = capsys.readouterr().out
    assert "digest of all weights" in printed
    assert "seconds for 140 GB, extrapolated" in printed


def test_unmeasurable_settings_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="--model and --shape both name the model"):
        weights.run("x", "small", "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidParameter, match="PyTorch found no CUDA device: use --device cpu"):
            weights.run(None, None, "cuda")
