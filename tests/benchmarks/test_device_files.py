"""Tests of the measurement of files and CUDA devices."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.__main__ import main
from kvpack.errors import InvalidParameter


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device with this name may exist")
def test_a_missing_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device-files", "--synthetic", "1x1x1x64x64", "--device", "cuda:5"]) == InvalidParameter.exit_code
    assert "device is 'cuda:5'" in capsys.readouterr().err


@pytest.mark.cuda
def test_loads_and_saves_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["device-files", "--synthetic", "2x1x2x64x64", "--recipe", "bf16", "--repeats", "1"]
    assert main([*given, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["device_rows"]
    assert [row["operation"] for row in rows] == ["load to the device", "save from the device"]
    assert main(given) == 0
    assert "x bus" in capsys.readouterr().out
