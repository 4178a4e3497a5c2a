"""kvpack tune --widths: one measurement per layer and side, and widths derived from the losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvpack.coding.recipes import parse_recipe
from kvpack.errors import InvalidParameter
from kvpack.tuning import calibrate, tune
from kvpack.tuning.widths import average_bits

if TYPE_CHECKING:
    from pathlib import Path

SIZES = tune.TuningSettings(tokens=512, scored_tokens=128, windows=1, held_out_windows=1, file_tokens=512)


@pytest.mark.scenario
def test_layers_with_larger_losses_get_more_bits() -> None:
    done: list[tuple[int, int]] = []
    report = tune.run(None, None, 4.0, SIZES, widths=True, progress=lambda *counts: done.append(counts))
    assert done[-1][0] == done[-1][1]
    assert report["mode"] == "widths"
    assert report["tuned"]["bits_per_value"] <= 4
    sensitivities = report["sensitivities"]
    assert len(sensitivities) == 2 * len(report["layers"])
    assert all(average_bits(one["codec"], one["side"]) == 2 for one in sensitivities)
    assert {one["what"] for one in report["measured"]} == {"widths", "uniform"}
    found = next(one for one in report["measured"] if one["what"] == "widths")
    rules = parse_recipe(found["recipe"])
    order = sorted(sensitivities, key=lambda one: one["kl_divergence"])
    least, most = (
        average_bits(str(_clause(rules, one["layer"], one["side"], len(report["layers"]))), one["side"]) for one in (order[0], order[-1])
    )
    assert least < most


def _clause(recipe: object, layer: int, side: str, layers: int) -> str:
    rules = [rule for rule in recipe.rules if side in rule.sides and rule.covers(layer, layers)]  # type: ignore[attr-defined]
    words = ",".join(f"{name}={value}" for name, value in rules[-1].words)
    return f"{rules[-1].codec_id}:{words}"


@pytest.mark.scenario
def test_keys_are_balanced_by_a_basis_with_frames(tmp_path: Path) -> None:
    basis = tmp_path / "x.kvbasis"
    calibrate.run(None, None, str(basis), calibrate.CalibrationSettings(tokens=256, windows=2, balanced_only=True))
    sizes = SIZES
    report = tune.run(None, None, 5.0, sizes, widths=True, basis=str(basis), out=str(tmp_path / "recipe.txt"))
    assert "frame=centered" in report["measured"][0]["recipe"]
    clauses = parse_recipe(f"@{tmp_path / 'recipe.txt'}")
    assert clauses.needs_basis
    assert clauses.text == report["recipe"]


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="the width search supports only codecs with b=<bits>"):
        tune.run(None, None, 16.0, SIZES, widths=True, candidates=["angle:n=64"])
    with pytest.raises(InvalidParameter, match="with these candidates, a file of 512 tokens has at least"):
        tune.run(None, None, 0.5, SIZES, widths=True)
