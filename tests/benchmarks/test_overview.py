"""Tests of the plot in the README: where its numbers come from, what it shows, and which reports are refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import overview
from benchmarks.__main__ import main
from kvpack.bench import kernels
from kvpack.errors import InvalidParameter, MissingFile

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "kvpack" / "bench" / "measured"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MEASURED, tmp_path / "measured"))


def _report(name: str) -> Any:
    return json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))


def _texts(path: Path) -> list[str]:
    return sorted(re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text(encoding="utf-8")))


def test_speeds_are_those_of_the_table() -> None:
    text = (ROOT / "kernels" / "README.md").read_text(encoding="utf-8").split("\n## Speed\n")[1].split("\n### ")[0]
    table = {name: cells.split(" | ") for name, cells in re.findall(r"^\| `?([^|`]+)`?[^|]*? \| ([\d. |]+) \|$", text, re.MULTILINE)}
    report = _report("kernels")
    short = [shape for shape in report["sweep"] if shape["tokens"] == overview.SHORT_TOKENS]
    assert len(report["sweep"]) == len(kernels.SWEEP_TOKENS)
    for column, shape in enumerate([*report["shapes"], *short]):
        ratios = {row["recipe"]: f"{row['of_bf16']:.2f}" for row in shape["rows"] if "SDPA" not in row["recipe"]}
        assert len(ratios) > 20
        assert ratios == {name: table[name][column] for name in ratios}


def test_committed_plots_match_the_reports(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("overview.svg", "kernels.svg"):
        (folder / name).unlink()
    assert main(["overview", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"picture": str(folder / "overview.svg")}
    drawn = _texts(folder / "overview.svg")
    assert drawn == _texts(MEASURED / "overview.svg")
    times = _texts(folder / "kernels.svg")
    assert times == _texts(MEASURED / "kernels.svg")
    assert {row["recipe"] for row in _report("kernels")["sweep"][0]["rows"]} <= set(times)
    assert {row["recipe"] for row in _report("quality")["recipes"]} <= set(drawn)
    assert set(overview.RECIPES) <= set(drawn)
    assert (MEASURED / "overview.svg").stat().st_size < 100_000


def test_a_missing_report_is_named(folder: Path) -> None:
    (folder / "kernels.json").unlink()
    with pytest.raises(MissingFile, match=r"kernels\.json: No such file .*kvpack bench kernels --sweep --out"):
        overview.run(str(folder))


@pytest.mark.parametrize("text", ["{", "[]", '{"recipes": []}'])
def test_invalid_reports_are_refused(folder: Path, text: str) -> None:
    (folder / "quality.json").write_text(text)
    with pytest.raises(InvalidParameter, match=r"quality\.json: is not .*kvpack bench quality --out"):
        overview.run(str(folder))


def test_a_sweep_without_the_plotted_recipes_is_refused(folder: Path) -> None:
    report = _report("kernels")
    report["sweep"] = [shape for shape in report["sweep"] if shape["tokens"] != overview.SHORT_TOKENS]
    (folder / "kernels.json").write_text(json.dumps(report))
    with pytest.raises(InvalidParameter, match=r"none of the recipes fp8, nvfp4, .* at 16,384 tokens"):
        overview.run(str(folder))
