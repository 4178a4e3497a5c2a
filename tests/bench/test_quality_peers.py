"""The peers of bench quality: transformers' QuantizedCache, by a backend of the tests and by those that are installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import cache_utils

from kvpack import cli
from kvpack.bench import quality, quality_peers
from kvpack.bench.quality_peers import Peer


class Rounded(cache_utils.QuantizedLayer):  # type: ignore[misc]
    """A backend whose codes are bytes: a scale and a zero point per token and head."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        low, high = tensor.amin(-1, keepdim=True), tensor.amax(-1, keepdim=True)
        scale = (high - low).clamp_min(1e-9) / (2**self.nbits - 1)
        return ((tensor - low) / scale).round().to(torch.uint8), {"scale": scale, "zero": low}

    def _dequantize(self, quantized: Any) -> torch.Tensor:
        codes, meta = quantized
        return codes.to(torch.float32) * meta["scale"] + meta["zero"]


class Cache(cache_utils.Cache):  # type: ignore[misc]
    def __init__(self, backend: str, config: Any, nbits: int, axis_key: int, axis_value: int) -> None:
        super().__init__(layers=[Rounded(nbits, axis_key, axis_value) for _ in range(config.num_hidden_layers)])


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_utils, "QuantizedCache", Cache)
    monkeypatch.setattr(quality, "installed_peers", lambda: [Peer("hqq", 4), Peer("hqq", 2)])


@pytest.mark.usefixtures("backend")
def test_peers_are_measured_in_the_same_windows(capsys: pytest.CaptureFixture[str]) -> None:
    settings = quality.Settings(tokens=288, scored_tokens=96, windows=2, needles=0, peers=True)
    steps = []
    report = quality.run(None, None, ["kivi-4"], settings, reference="kivi-4", progress=lambda *step: steps.append(step))
    assert steps[-1] == (8, 8)
    four, two = report["peers"]
    assert (four["recipe"], two["recipe"]) == ("hqq, 4 bits", "hqq, 2 bits")
    for row, kivi in zip(four["windows"], report["recipes"][0]["windows"], strict=True):
        assert 0 < row["kl_divergence"] < 100 * kivi["kl_divergence"]
    assert 0 < four["kl_divergence"] < two["kl_divergence"]
    assert four["of_reference"]["ratio"] > 0
    # 192 tokens are quantized first, 96 stay in the residual window: bytes, a scale and a zero point per 64 codes, and 2 bytes a value.
    assert four["bits_per_value"] == pytest.approx((192 * (64 + 4) + 96 * 128) * 8 / (288 * 64))
    quality.show(report)
    shown = capsys.readouterr().out
    assert "hqq, 2 bits" in shown
    assert "Peers are transformers' QuantizedCache" in shown


def test_peers_must_be_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(quality_peers, "find_spec", lambda name: None)
    assert cli.main(["bench", "quality", "--model", "demo", "--peers"]) == 2
    assert "pip install optimum-quanto hqq" in capsys.readouterr().err


def test_offsets_are_of_kvpacks_caches_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "quality", "--model", "demo", "--peers", "--offset", "4"]) == 2
    assert "omit --offset or --peers" in capsys.readouterr().err
