"""Tests of the encoding table of ``kvpack bench kernels``: its codecs, its output, and a small run on CUDA."""

from __future__ import annotations

import pytest

from kvpack.bench import encode_kernels


def test_equal_sides_and_raw_sides_are_omitted() -> None:
    recipes = ("kivi-2", "octopus-3", "bf16", "klt=6310:5310")
    assert {recipe: [(side, codec.id) for side, codec in encode_kernels.measured_codecs(recipe, 2, 64)] for recipe in recipes} == {
        "kivi-2": [("k", "group"), ("v", "group")],
        "octopus-3": [("k", "octahedral"), ("v", "group")],
        "bf16": [],
        "klt=6310:5310": [("k", "klt"), ("v", "klt")],
    }
    assert [side for side, _ in encode_kernels.measured_codecs("kv=scalar:b=3", 2, 64)] == ["k"]


def test_the_table_shows_every_codec(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"bytes": 1000, "pack_seconds": 2e-3, "unpack_seconds": 4e-3, "unpack_gb_per_s": 33.25}
    by_kernel = {"recipe": "kv=scalar:b=4", "side": "k", "seconds": 1e-4, "gb_per_s": 671.1, "of_floor": 2.5, "paper_seconds": 1.5e-3}
    by_torch = {"recipe": "oscar-2-u8", "side": "v", "seconds": None, "gb_per_s": None, "of_floor": None, "paper_seconds": None}
    report = {**encode_kernels.SHAPE._asdict(), "bytes": 1 << 26, "copy_seconds": 3.4e-5, "rows": [by_kernel | row, by_torch | row]}
    encode_kernels.show(report, "a device")
    text = capsys.readouterr().out
    lines = [line.split() for line in text.splitlines()]
    assert "encode: 1 x 4 heads x 128, 65,536 tokens, on a device" in text
    assert ["kv=scalar:b=4", "k", "1,000", "100.0", "671", "2.50", "1500", "2.00", "4.00", "33"] in lines
    assert ["oscar-2-u8", "v", "1,000", "2.00", "4.00", "33"] in lines
    assert "3.95 TB/s read and written" in text


@pytest.mark.cuda
def test_a_small_shape_is_measured() -> None:
    recipes = ["kivi-4;raw=0", "kv=group:b=2,scales=u8", "klt=6310:5310"]
    report = encode_kernels.run(recipes, encode_kernels.KeyValueShape(1, 2, 2048, 64))
    assert [(row["recipe"], row["side"]) for row in report["rows"]] == [(recipe, side) for recipe in recipes for side in "kv"]
    assert [row["seconds"] is not None for row in report["rows"]] == [True, True, False, False, True, True]
    assert all(row["pack_seconds"] > 0 and row["unpack_seconds"] > 0 for row in report["rows"])
    assert report["rows"][0]["seconds"] < report["rows"][0]["pack_seconds"]
