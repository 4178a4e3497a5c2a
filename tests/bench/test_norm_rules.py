"""The comparison of both rules of norms: which recipes it takes, and its figures."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvpack import cli
from kvpack.bench import norm_rules, quality
from kvpack.coding.recipes import Recipe
from kvpack.coding.recorded_presets import RECORDED
from kvpack.formats import CODECS


def test_the_presets_compared_are_those_that_the_rule_changes() -> None:
    found = norm_rules.recipes()
    assert {"octopus-3", "turboquant-2", "polarquant-4", "hqmq-s24-r3", "turboangle-k8v4", "oscar-2", "oscar-2-g128"} <= set(found)
    assert not {"raw", "bf16", "kivi-2", "quarot-4", "octopus-qjl-3", "int-2"} & set(found)


@pytest.mark.parametrize("name", norm_rules.recipes())
def test_the_papers_recipe_differs_in_the_rule_alone(name: str) -> None:
    other = norm_rules.with_papers_rule(name)
    assert other is not None
    recipe, papers = Recipe(RECORDED[name]), Recipe(other)
    assert recipe.window == papers.window
    for side in "kv":
        one, two = (parsed.codec(0, 4, side, 128) for parsed in (recipe, papers))
        assert one == two
        rules = [getattr(codec, "codec", codec).norm_rule for codec in (one, two)]
        assert rules == ["unbiased", "norm"]


def test_layers_and_windows_stay() -> None:
    recipe = "k=octahedral:b=3;v=group:b=3,g=32;layers=0,-2--1:k=raw;tail=32"
    other = norm_rules.with_papers_rule(recipe)
    assert other == "k=octahedral:b=3,norm_rule=norm;v=group:b=3,g=32,norm_rule=norm;layers=0-0,-2--1:k=raw;tail=32"
    for layer in range(4):
        assert Recipe(recipe).codec(layer, 4, "k", 128) == Recipe(other).codec(layer, 4, "k", 128)


def test_both_rules_at_equal_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    settings = quality.Settings(tokens=512, score=96, windows=2, needles=1)
    report = norm_rules.run(None, None, ["kv=scalar:b=2", "octopus-2"], settings)
    assert [row["recipe"] for row in report["norm_rules"]] == ["kv=scalar:b=2", "octopus-2"]
    for row in report["norm_rules"]:
        # The header alone differs: it holds the recipe's text.
        assert row["bits_per_value"] == pytest.approx(row["papers_bits_per_value"], abs=0.01)
        low, high = row["difference_interval"]
        assert low <= row["kl_divergence"] - row["papers_kl_divergence"] <= high
    assert report["norm_rules"][0]["kl_divergence"] < report["norm_rules"][0]["papers_kl_divergence"]
    norm_rules.show(report)
    printed = capsys.readouterr().out
    assert "norm_rule=norm" in printed
    assert "None" not in printed


def test_a_recipe_without_the_rule_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "quality", "--model", "demo", "--norm-rules", "--recipe", "kivi-2"]) == 2
    assert "changes nothing of 'kivi-2'" in capsys.readouterr().err


def test_every_codec_that_takes_the_rule_is_asked() -> None:
    taking: Any = {name for name, codec in CODECS.items() if any(field.name == "norm_rule" for field in fields(codec))}  # type: ignore[arg-type]
    assert taking == {"scalar", "trellis", "octahedral", "polar", "angle", "quaternion", "group"}
