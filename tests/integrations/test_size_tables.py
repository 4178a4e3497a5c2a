"""The tables of bytes per token on the engines' pages match the size of rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvpack.cli import main
from kvpack.pages import PageCodec, PageGeometry

PAGES = Path(__file__).parents[2] / "kvpack" / "integrations"


@pytest.mark.parametrize("engine", ["vllm", "sglang", "lmcache"])
def test_a_table_shows_the_bytes_of_rows(engine: str) -> None:
    text = (PAGES / engine / "README.md").read_text()
    model = re.search(
        r"a model of (\d+) layers, (\d+) KV heads and head dim (\d+), .* keeps in ([\d,]+) bytes, in \w+ of (\d+) tokens:", text
    )
    assert model is not None
    layers, heads, dim, raw, tokens = (int(number.replace(",", "")) for number in model.groups())
    geometry = PageGeometry(layers, heads, tokens, dim, dim)
    assert geometry.raw_bytes == raw * tokens
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d,]+) \| (\d\.\d\d) \|$", text[model.end() :], re.MULTILINE)
    assert len(rows) >= 5
    for recipe, size, ratio in rows:
        with PageCodec(recipe, geometry) as codec:
            assert (f"{codec.nbytes / tokens:,.0f}", f"{codec.nbytes / geometry.raw_bytes:.2f}") == (size, ratio), recipe


def test_a_table_shows_the_bytes_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    text = (PAGES / "mlx_lm" / "README.md").read_text()
    model = re.search(r"of (\d+) layers, (\d+) KV heads and head dim (\d+), .* in ([\d,]+) bytes, in files of ([\d,]+) tokens:", text)
    assert model is not None
    layers, heads, dim, raw, tokens = (int(number.replace(",", "")) for number in model.groups())
    assert raw == 4 * layers * heads * dim
    rows = re.findall(r"^\| `([\w-]+)` \| ([\d,]+) \| (\d\.\d\d) \|$", text[model.end() :], re.MULTILINE)
    assert len(rows) >= 5
    shape = ["--layers", str(layers), "--heads", str(heads), "--tokens", str(tokens), "--dim", str(dim)]
    assert main(["recipes", *(recipe for recipe, *_ in rows), *shape, "--json"]) == 0
    for row, found in zip(rows, json.loads(capsys.readouterr().out)["recipes"], strict=True):
        bits = found["bits_per_value"]
        assert row == (found["name"], f"{bits / 16 * raw:,.0f}", f"{bits / 16:.2f}")
