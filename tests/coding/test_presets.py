"""Tests of the published configurations: the papers' figures, and the command that lists the presets."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvpack
from kvpack import cli
from kvpack.coding.presets import ADDITIONS, PUBLISHED
from kvpack.coding.recipes import PRESETS, Recipe
from kvpack.coding.recorded_presets import RECORDED
from kvpack.commands.recipes import _equal_layers, recipe_sizes
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from support.caches import random_pairs
from support.klt_bases import random_basis

if TYPE_CHECKING:
    from pathlib import Path

# TurboAngle: layers and angle bits (Table 2), boosted layers and their bins (Table 3), head dim (Table 5).
MIXED_KV = {
    "tinyllama-1.1b": (22, 3.34, range(4), (128, 256), 64),
    "mistral-7b": (32, 3.31, range(4), (256, 128), 128),
    "smollm2-1.7b": (24, 3.67, range(20), (256, 128), 64),
    "phi-1.5": (24, 3.58, (*range(8), *range(16, 24)), (256, 128), 64),
    "stablelm-2-1.6b": (32, 3.63, range(24), (256, 128), 64),
    "starcoder2-3b": (40, 3.45, range(16), (256, 128), 64),
    "olmo-1b": (32, 3.28, range(4), (256, 64), 64),
}


RAW_BITS = 4 * (16 + 64 / (8 * 128)) / 4096
"""Bits per value that raw tokens and their positions add to the papers' recipes."""


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["recipes", *map(str, words)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("model", MIXED_KV)
def test_mixed_kv_presets_match_the_paper(model: str) -> None:
    layers, angle_bits, boosted, bins, dim = MIXED_KV[model]
    preset = PUBLISHED[f"mixedkv-{model}"]
    assert (preset.layers, preset.dim) == (layers, dim)
    recipe = Recipe(preset.recipe)
    recipe.check_layers(layers)
    total = 0.0
    for layer in range(layers):
        k, v = (recipe.codec(layer, layers, side, dim).params() for side in "kv")
        assert (k["bins"], v["bins"]) == (bins if layer in boosted else (128, 64))
        assert (k["norm"], k["norm_bits"], v["norm"], v["norm_bits"]) == ("linear", 8, "log", 4)
        total += (math.log2(k["bins"]) + math.log2(v["bins"])) / 4
    assert total / layers == pytest.approx(angle_bits, abs=0.005)


def test_every_model_of_the_paper_has_a_preset() -> None:
    assert {name.removeprefix("mixedkv-") for name in PUBLISHED if name.startswith("mixedkv-")} == set(MIXED_KV)


@pytest.mark.parametrize(
    ("name", "params", "window"),
    [
        ("turboquant-sym4-g4", {"bits": 4, "size": 4, "axis": "channel", "rotation_kind": "signed-hadamard"}, 0),
        ("quarot-2", {"bits": 2, "size": 128, "axis": "channel", "rotation_kind": "hadamard", "token_scale": "none"}, 0),
        ("int-3", {"bits": 3, "size": 128, "axis": "channel", "rotation_kind": "none"}, 0),
        ("kivi-4-g128", {"bits": 4, "size": 128, "axis": "token", "rotation_kind": "none"}, 128),
        ("oscar-2-g128", {"bits": 2, "size": 128, "axis": "token", "rotation_kind": "hadamard", "token_scale": "fp16"}, 128),
    ],
)
def test_group_presets_have_the_published_key_options(name: str, params: dict[str, Any], window: int) -> None:
    recipe = Recipe(name)
    assert recipe.codec(0, 1, "k", 128).params().items() >= params.items()
    assert recipe.window == window


WITH_MEANS = ("octopus-", "turboquant-2", "turboquant-3", "turboquant-4", "turboquant-qjl-", "polarquant-", "hqmq-")


def test_presets_extend_the_methods_of_papers() -> None:
    added = {"key_mean": {"tokens": 32, "bits": 4}, "norm": "log8"}
    names = [name for name in RECORDED if name.startswith(WITH_MEANS)]
    assert len(names) >= 40
    for name in names:
        for side in "kv":
            own, paper = (recipe.codec(0, 1, side, 64).params() for recipe in (Recipe(name), Recipe.from_recorded(name)))
            changed = {key: value for key, value in own.items() if paper.get(key) != value}
            assert changed.pop("raw_positions")
            if name.startswith("hqmq-"):
                assert changed == ({"key_mean": {"tokens": 128, "bits": 8}} if side == "k" else {}), name
            elif side == "k":
                fine = paper["norm"] if (name.endswith(("-4", "-4-scaled")) and name != "turboquant-qjl-4") or "polar" in name else "log8"
                assert changed == {key: value for key, value in (added | {"norm": fine}).items() if paper.get(key) != value}, name
            else:
                assert changed.keys() <= {"norm"}, name


def test_symmetric_presets_have_centers_of_zero() -> None:
    pairs = random_pairs(1, 40)
    for side in kvpack.pack(pairs, "turboquant-sym3-g4")[0].sides.values():
        assert not side.runs[0].streams["scales"][..., 1].any()


@pytest.mark.parametrize("recipe", ["oscar-2;boundary-1;tail=32", "mixedkv-tinyllama-1.1b;layers=4-21:kv=raw"])
def test_rates_equal_those_of_a_packed_cache(recipe: str) -> None:
    layers = 22
    cache = kvpack.pack(random_pairs(layers, 75), recipe)
    assert recipe_sizes(Recipe(recipe), _equal_layers(layers, 2, 75, 64))[:2] == pytest.approx((cache.nominal_bits, cache.bits_per_value))


def test_rates_refuse_impossible_shapes() -> None:
    with pytest.raises(OutOfBounds, match=r"names layer \d+, but the cache has only 4 layers"):
        recipe_sizes(Recipe("mixedkv-phi-1.5"), _equal_layers(4, 1, 1, 64))
    with pytest.raises(InvalidParameter, match="no Hadamard rotation for 72 channels"):
        recipe_sizes(Recipe("octopus-3"), _equal_layers(1, 1, 1, 72))


@pytest.mark.scenario
def test_the_command_lists_presets_and_additions(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "--json"))
    assert [row["name"] for row in found["recipes"]] == list(PRESETS)
    assert [row["name"] for row in found["additions"]] == list(ADDITIONS)
    rows = {row["name"]: row for row in found["recipes"]}
    assert rows["kivi-2"] == {
        "name": "kivi-2",
        "source": "KIVI",
        "recipe": "kv=group:b=2,g=32;raw=4,0.5,4",
        **{"layers": 32, "heads": 8, "tokens": 4096, "dim": 128},
        "nominal_bits": pytest.approx(2.0),
        "bits_per_value": pytest.approx(3.017, abs=0.001),
        "bytes": 101_240_704,
        "kl_divergence": pytest.approx(0.0872, abs=0.00005),
        "breaks_on": [],
        "lossless": [],
    }
    assert {name for name in rows if name.startswith(("kvpack", "octopus")) and rows[name]["breaks_on"]} == {
        name for name in PRESETS if name.startswith("octopus") and not name.endswith("-scaled")
    }
    lossless = {name: row["lossless"] for name, row in rows.items() if row["lossless"]}
    every = ["bf16", "fp16", "fp32"]
    assert lossless == {"raw": every, "lossless": every[:2], "bf16": ["bf16"], "fp16": ["fp16"], "fp32": every}
    # TurboAngle's total for Mistral-7B; a range in fp16 takes half of what Eq. 3 counts.
    assert rows["mixedkv-mistral-7b"]["bits_per_value"] == pytest.approx(6.56 + RAW_BITS, abs=0.005)
    assert (rows["mixedkv-olmo-1b"]["layers"], rows["mixedkv-olmo-1b"]["dim"]) == (32, 64)
    text = run(capsys, "--all")
    for name in (*PRESETS, *ADDITIONS):
        assert f" {name} " in text


def test_the_command_computes_rates_of_any_recipe_and_shape(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = "kivi-2;boundary-1"
    (row,) = json.loads(run(capsys, recipe, "--layers", 4, "--heads", 2, "--tokens", 64, "--dim", 80, "--json"))["recipes"]
    assert (row["layers"], row["heads"], row["tokens"], row["dim"]) == (4, 2, 64, 80)
    cache = kvpack.pack(random_pairs(4, 64, dims=(80, 80)), recipe)
    assert row["bits_per_value"] == pytest.approx(cache.bits_per_value)
    assert recipe in run(capsys, recipe)
    file = tmp_path / "recipe.txt"
    file.write_text("kivi-2  # keys\nboundary-1\n")
    (from_file,) = json.loads(run(capsys, f"@{file}", "--layers", 4, "--heads", 2, "--tokens", 64, "--dim", 80, "--json"))["recipes"]
    assert (from_file["recipe"], from_file["bits_per_value"]) == (Recipe(recipe).text, row["bits_per_value"])


def test_the_command_computes_rates_with_a_basis(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command prints bits per value for the shape of the preset's model, so that recipes can be compared."""
    shapes = {(layer, side): (2, 32) for layer in range(3) for side in "kv"}
    path, uneven = tmp_path / "x.kvbasis", tmp_path / "uneven.kvbasis"
    path.write_bytes(random_basis(shapes, 3))
    uneven.write_bytes(random_basis(shapes | {(2, "v"): (2, 48)}, 3))
    rows = json.loads(run(capsys, "klt-2", "kivi-2", "--tokens", 64, "--basis", path, "--json"))["recipes"]
    for row in rows:
        assert (row["layers"], row["heads"], row["dim"]) == (3, 2, 32)
        cache = kvpack.pack(random_pairs(3, 64, dims=(32, 32)), kvpack.Recipe(row["name"], path))
        assert (row["nominal_bits"], row["bits_per_value"]) == pytest.approx((cache.nominal_bits, cache.bits_per_value))
    for words, message in (
        (["klt-2"], "pass --basis FILE to a command, or kvpack.Recipe"),
        (["klt-2", "--basis", path, "--heads", 8], "--heads is 8, but .*x.kvbasis is for caches with 2 heads: omit --heads"),
        (["klt-2", "--basis", uneven], r"uneven.kvbasis: its layers have different shapes, \[\(2, 32\), \(2, 48\)\]"),
    ):
        assert cli.main(["recipes", *map(str, words)]) != 0
        assert re.search(message, capsys.readouterr().err)


def test_presets_unsuitable_for_a_head_dim_without_a_rotation_are_named() -> None:
    x = torch.randn(1, 1, 40, 72)
    for make in (lambda: kvpack.pack([(x, x)], "octopus-3"), lambda: kvpack.pack([(x, x)], "kivi-2").convert("octopus-3")):
        with pytest.raises(InvalidParameter, match=r"no Hadamard .* 72 channels.*; presets that support head dim 72 are ") as raised:
            make()
        named = str(raised.value).rpartition(" are ")[2].split(", ")
        assert "kivi-2" in named
        assert len(named) >= 3
        for name in named:
            assert kvpack.pack([(x, x)], name)[0].k.dim == 72


@pytest.mark.scenario
def test_presets_that_do_not_support_a_shape_are_listed_without_bits(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row["name"]: row for row in json.loads(run(capsys, "--dim", 72, "--layers", 4, "--json"))["recipes"]}
    assert rows["kivi-2"]["bits_per_value"] is not None
    assert rows["octopus-3"]["bits_per_value"] is rows["mixedkv-phi-1.5"]["nominal_bits"] is None
    assert " - " in run(capsys, "--dim", 72)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["octopus-3", "--dim", "72"], "no Hadamard rotation for 72 channels"),
        (["--layers", "0"], "--layers is 0, expected 1 to 4096"),
        (["--tokens", "-5"], "--tokens is -5, expected 1 to 1099511627775"),
        (["octopus-9"], "did you mean octopus-"),
    ],
)
def test_the_command_refuses_invalid_arguments(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes", *words]) == 2
    assert message in capsys.readouterr().err


def test_the_4_bit_turboquant_preset_improves_with_smaller_groups() -> None:
    x = torch.randn(1, 2, 256, 128, generator=torch.Generator().manual_seed(1))
    errors = {}
    for name in ("turboquant-sym3-g4", "turboquant-sym4-g4", "int-4"):
        codec = Recipe(name).codec(0, 1, "k", 128)
        errors[name] = (codec.decode(codec.encode(x)) - x).square().mean().item()
    assert errors["turboquant-sym4-g4"] < errors["int-4"] < errors["turboquant-sym3-g4"]
