"""Tests of the decoding benchmark: its results and its refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks import decode
from benchmarks.__main__ import main
from kvpack.errors import InvalidParameter
from support.klt_bases import random_basis

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = {(0, "k"): (2, 16), (0, "v"): (2, 16)}


@pytest.mark.parametrize("scope", ["head", "layer"])
def test_decoding_is_timed_along_with_its_products(scope: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.kvbasis"
    path.write_bytes(random_basis(SHAPES, 1, scopes=dict.fromkeys(SHAPES, scope)))
    words = ["decode", "--basis", str(path), "--tokens", "300", "--bits", "4", "--repeats", "1"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["rows"]
    assert (report["scope"], row["bytes"]) == (scope, 2 * 2 * 2 * 300 * 16)
    assert 0 < row["products_per_value"] <= (16 if scope == "head" else 32)
    assert min(row["seconds"], row["symbols_seconds"], row["products_seconds"]) > 0
    assert main(words) == 0
    assert "transform-4" in capsys.readouterr().out


def test_a_basis_without_frames_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.kvbasis"
    path.write_bytes(random_basis(SHAPES, 1, scopes={(0, "v"): "head"}))
    with pytest.raises(InvalidParameter, match="frames of keys and values in 0 of its 1 layers"):
        decode.run(str(path))
    path.write_bytes(random_basis(SHAPES, 1, scopes=dict.fromkeys(SHAPES, "head")))
    with pytest.raises(InvalidParameter, match="tokens is 0 and repeats is 5"):
        decode.run(str(path), tokens=0)
