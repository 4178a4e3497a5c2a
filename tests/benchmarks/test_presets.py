"""Tests of the preset benchmark: rows of windows are measured only once, and compared with the papers' recipes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import presets
from benchmarks.__main__ import main
from kvpack.coding.bases import Basis
from kvpack.errors import InvalidParameter
from support.klt_bases import balanced_basis

TEXT = str(Path(__file__).parents[2] / "kvpack" / "demo" / "demo.txt")


def test_rows_of_windows_are_measured_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row for row in presets.ROWS if row.name in (presets.SCALAR, "kvpack-2", "kvpack-2, basis")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presets, "SCORE", 8)
        settings = presets.Settings(None, TEXT, str(tmp_path), windows=2, tokens=64)
        report = presets.run(settings, rows=rows)
        file = tmp_path / "window-1.json"
        kept = json.loads(file.read_text())
        kept["kvpack-2"]["kl_divergence"] = 100.0
        del kept[presets.SCALAR]
        file.write_text(json.dumps(kept))
        again = presets.run(settings, rows=rows)
    assert [row["name"] for row in report["rows"]] == [presets.SCALAR, "kvpack-2"]
    own = report["rows"][1]
    assert again["rows"][0]["kl_divergence"] == pytest.approx(report["rows"][0]["kl_divergence"])
    assert own["part"] == pytest.approx(own["kl_divergence"] / report["rows"][0]["kl_divergence"])
    assert again["rows"][1]["kl_divergence"] > 50
    assert not again["rows"][1]["within"]
    presets.show(again)
    assert "kvpack-2" in capsys.readouterr().out


def test_every_row_is_a_recipe() -> None:
    losses = {f"losses.{side}": "0.3,0.2,0.1,0.0" for side in "kv"}
    basis = Basis.from_bytes(balanced_basis(dict.fromkeys(range(4), (2, 64)), 4, model=losses))
    names = {row.name for row in presets.ROWS}
    for row in presets.ROWS:
        recipe = presets.recipe_of(row, basis)
        assert recipe.needs_basis == row.by_basis
        assert not row.of or row.of in names
        if row.average:
            bits = [recipe.codec(layer, 4, side, 64).without_sidecars.bits for layer in range(4) for side in "kv"]  # type: ignore[attr-defined]
            assert row.average - 1 / 8 < sum(bits) / 8 <= row.average


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("short")
    with pytest.raises(InvalidParameter, match="no --windows is possible"):
        presets.run(presets.Settings(None, str(short), str(tmp_path / "out"), windows=1))
    assert main(["presets", "--model", "demo", "--text", str(short), "--out", str(tmp_path / "out")]) == 2
