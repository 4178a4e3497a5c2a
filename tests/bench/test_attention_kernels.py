"""Tests of ``kvpack bench kernels``: the options that it refuses without a device, and a small run on CUDA."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from kvpack.bench import kernels, synthetic_basis
from kvpack.cli import main
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.transform import Transform

if TYPE_CHECKING:
    from pathlib import Path


def test_shapes_are_given_by_letter_or_by_numbers() -> None:
    assert kernels.parse_shape("B") == kernels.QueryShape(1, 32, 8, 128, 131072)
    assert kernels.parse_shape("2x8x4x64x1000") == kernels.QueryShape(2, 8, 4, 64, 1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("G", "expected one of A, B, C, D, E, F or", id="letter"),
        pytest.param("1x2x3", "expected one of A, B, C, D, E, F or", id="too few numbers"),
        pytest.param("1x3x2x64x10", "3 query heads are not a multiple of 2 KV heads", id="heads"),
    ],
)
def test_unknown_shapes_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        kernels.parse_shape(text)


def test_synthetic_basis_has_widths_from_its_name() -> None:
    k, v = (torch.randn(1, 2, 32, dim) for dim in (128, 40))
    layer = synthetic_basis.pack(k, v, "klt=83211000:5710")
    assert layer.k is not None
    assert layer.v is not None
    assert (layer.k.codec.widths, layer.v.codec.widths) == (bytes([8, 3, 2, 1, 1, 0, 0, 0]), bytes([5, 7, 1]))
    for recipe in ("klt=12", "klt=9:1", "klt=000:1", "klt=1:2:3"):
        with pytest.raises(InvalidParameter, match="expected a name such as klt=63211000:53100000"):
            synthetic_basis.check_recipe(recipe)


def test_klt_layers_have_the_requested_bits(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(synthetic_basis.LAYERS) < set(kernels.RECIPES)
    measured = {"bytes": 1000, "seconds": 1e-3, "whole_seconds": 1e-3, "gb_per_s": 1.0, "of_floor": 2.0, "of_bf16": 0.5}
    measured |= {"eager_seconds": 2e-3, "eager_of_bf16": 4.0, "error": 1e-4, "unpack_seconds": 1e-3}
    table = {"name": "B", **kernels.SHAPES["B"]._asdict(), "rows": [{"recipe": recipe, **measured} for recipe in synthetic_basis.LAYERS]}
    kernels.show({"device": "a device", "bytes_per_s": 3e12, "shapes": [table], "sweep": [], "encode": None, "unpack": None, "queries": []})
    shown = capsys.readouterr().out
    for recipe in synthetic_basis.LAYERS:
        widths = [int(digit) for digit in recipe.removeprefix(synthetic_basis.NAME).replace(":", "")]
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{recipe} uses the widths of ")]
        assert f"{sum(widths) / len(widths):.2f} bits per value" in line


@pytest.mark.parametrize("scope", ["head", "layer"])
def test_synthetic_transform_basis_has_bits_from_its_name(scope: str) -> None:
    k, v = (torch.randn(1, 2, 512, dim, generator=torch.Generator().manual_seed(dim)) for dim in (128, 40))
    layer = synthetic_basis.pack(k, v, f"transform=0.6:{scope}")
    for side in layer.sides.values():
        codec, streams = side.codec, side.runs[0].streams
        assert isinstance(codec, Transform)
        assert codec.scope == scope
        assert 0.4 < 16 * streams["words"].numel() / (2 * 512 * side.dim) < 0.7
        assert 0.3 < streams["columns"].float().mean() / side.dim < 0.6
    for recipe in ("transform=0.6", "transform=0.6:model", "transform=a:head"):
        with pytest.raises(InvalidParameter, match=r"as in transform=0\.6:head"):
            synthetic_basis.check_recipe(recipe)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_a_missing_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels"]) == InvalidParameter.exit_code
    assert "needs a CUDA device, but PyTorch found none" in capsys.readouterr().err


def test_recipes_without_a_kernel_are_marked_as_decoded_first(capsys: pytest.CaptureFixture[str]) -> None:
    measured = {"bytes": 1000, "seconds": 1e-3, "whole_seconds": 1e-3, "gb_per_s": 1.0, "of_floor": 2.0, "of_bf16": 3.0}
    measured |= {"eager_seconds": 2e-3, "eager_of_bf16": 4.0}
    rows = [
        {"recipe": "SDPA flash", "error": None, "unpack_seconds": None, **measured},
        {"recipe": "oscar-2", "error": 1e-4, "unpack_seconds": 1e-3, "decoded_first": False, **measured},
        {"recipe": "kv=raw,outliers=3", "error": 1e-4, "unpack_seconds": 1e-3, "decoded_first": True, **measured},
    ]
    table = {"name": "A", **kernels.SHAPES["A"]._asdict(), "rows": rows}
    kernels.show({"device": "a device", "bytes_per_s": 3e12, "shapes": [table], "sweep": [], "encode": None, "unpack": None, "queries": []})
    marked = [line for line in capsys.readouterr().out.splitlines() if "(decoded first)" in line]
    assert len(marked) == 1
    assert "kv=raw,outliers=3" in marked[0]


@pytest.mark.cuda
def test_a_small_shape_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["bench", "kernels", "--shape", "1x4x2x64x2048", "--recipe", "kivi-4", "--only", "attention", "--json"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["recipe"]: row for row in report["shapes"][0]["rows"]}
    assert rows["kivi-4"]["error"] < 2e-3
    assert rows["kivi-4"]["bytes"] < rows["bf16"]["bytes"] / 3
    assert json.loads((tmp_path / "kernels.json").read_text()) == report
    recipe = "kv=angle:n=64,norm=fp32"
    row = kernels.run(["1x4x2x64x2048"], [recipe], parts=("attention",))["shapes"][0]["rows"][-1]
    assert (row["recipe"], row["decoded_first"]) == (recipe, True)
    assert row["error"] < 2e-3
