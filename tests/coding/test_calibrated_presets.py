"""Tests of kvpack's own presets with a basis: keys are encoded in its frames, and widths are derived from the layers' losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack import cli
from kvpack.coding.bases import LOSSES, Basis
from kvpack.coding.calibrated_presets import MAX_WIDTH, choose_widths
from kvpack.coding.presets import KVPACK_PRESETS, MAX_LOG8_BITS
from kvpack.errors import InvalidHeader, InvalidParameter
from kvpack.integrations.recipes import recipe_with_basis
from support.caches import random_pairs
from support.klt_bases import balanced_basis, random_basis

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 4
LOSING = {"losses.k": "0.4,0.001,0.001,0.001", "losses.v": "0.002,0.001,0,0"}


def basis(model: dict[str, str]) -> Basis:
    """Return a basis for four layers with two heads of head dim 64."""
    return Basis.from_bytes(balanced_basis(dict.fromkeys(range(LAYERS), (2, 64)), LAYERS, model=model))


def test_keys_are_in_the_frames_of_the_basis() -> None:
    given = basis({})
    recipe = kvpack.Recipe("kvpack-3", given)
    assert recipe.text == (
        f"k=scalar:b=3,basis={given.digest.hex()},frame=centered,mean=128,norm=log8,rounding=scaled;"
        "v=scalar:b=3,norm=log8,rounding=scaled;raw=1,0.4,4"
    )
    trellis = kvpack.Recipe("kvpack-2-trellis", given)
    assert [rule.codec_id for rule in trellis.rules] == ["trellis", "trellis"]


def test_layers_with_larger_losses_get_more_bits() -> None:
    recipe = kvpack.Recipe("kvpack-2", basis(LOSING))
    found = {(layer, side): recipe.codec(layer, LAYERS, side, 64).without_sidecars.bits for layer in range(LAYERS) for side in "kv"}  # type: ignore[attr-defined]
    assert sum(found.values()) == 2 * len(found)
    assert max(found, key=found.__getitem__) == (0, "k")
    assert found[3, "v"] == 1
    assert "layers=" not in kvpack.Recipe("kvpack-2").text


@pytest.mark.parametrize("trellis", [False, True])
def test_any_average_width_is_supported(trellis: bool, tmp_path: Path) -> None:
    given, path = basis(LOSING), tmp_path / "x.kvbasis"
    path.write_bytes(given.data)
    recipe = kvpack.Recipe.calibrated(path, 2.4, trellis=trellis)
    found = [recipe.codec(layer, LAYERS, side, 64).without_sidecars for layer in range(LAYERS) for side in "kv"]
    assert sum(codec.bits for codec in found) == int(2.4 * len(found))  # type: ignore[attr-defined]
    assert ("trellis" in {codec.id for codec in found}) == trellis
    suffix = "-trellis" if trellis else ""
    assert kvpack.Recipe.calibrated(given, 3, trellis=trellis).text == kvpack.Recipe(f"kvpack-3{suffix}", given).text


def test_widths_that_a_basis_cannot_give_are_refused() -> None:
    for bits in (0.9, 8.5, float("nan"), "2"):
        with pytest.raises(InvalidParameter, match=r"bits is .*, expected a number from 1 to 8"):
            kvpack.Recipe.calibrated(basis(LOSING), bits)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameter, match="has no measured losses of layers: make it with kvpack calibrate"):
        kvpack.Recipe.calibrated(basis({}), 2.4)
    plain = Basis.from_bytes(random_basis({(layer, side): (2, 64) for layer in range(2) for side in "kv"}, 2))
    with pytest.raises(InvalidParameter, match="has no balanced frames of keys"):
        kvpack.Recipe.calibrated(plain, 2.4)


def test_wide_codes_of_the_trellis_presets_are_scalars() -> None:
    recipe = kvpack.Recipe("kvpack-4-trellis", basis(LOSING))
    codecs = [recipe.codec(layer, LAYERS, "k", 64).without_sidecars for layer in range(LAYERS)]
    assert {codec.id for codec in codecs} == {"scalar", "trellis"}
    assert all((codec.id == "scalar") == (codec.bits > 4) for codec in codecs)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "states"), [("kvpack-2-trellis", 256), ("kvpack-3-trellis", 1024), ("kvpack-4-trellis", 1024)])
def test_tables_of_short_codes_are_small(name: str, states: int) -> None:
    """The file has a table for the keys of each layer, because their frames differ."""
    for given in (None, basis({}), basis(LOSING)):
        recipe = kvpack.Recipe(name, given)
        codecs = [recipe.codec(layer, LAYERS, side, 64).without_sidecars for layer in range(LAYERS) for side in "kv"]
        assert {len(codec.table) for codec in codecs if codec.id == "trellis"} == {2 * states}  # type: ignore[attr-defined]


def test_widths_have_the_requested_average() -> None:
    losses = {(layer, side): 4.0 ** -layer for layer in range(6) for side in "kv"}
    for average in (1, 2, 5, MAX_WIDTH):
        found = choose_widths(losses, average)
        assert sum(found.values()) == average * len(losses)
        assert sorted(found.values(), reverse=True) == [found[layer, side] for layer in range(6) for side in "kv"]
    assert choose_widths({}, 3) == {}


def test_layers_without_a_measured_loss_get_enough_bits() -> None:
    losses = {(layer, "k"): 0.0 if layer % 2 else 0.001 for layer in range(8)}
    assert set(choose_widths(losses, 3).values()) == {2, 4}
    few = {(layer, "k"): 0.0 if layer % 4 else 0.001 for layer in range(8)}
    assert sorted(choose_widths(few, 2).values()) == [1, 1, 2, 2, 2, 2, 3, 3]


def test_key_norms_are_finer_with_fine_codes() -> None:
    norms = {}
    for name, own in KVPACK_PRESETS.items():
        rules = {rule.sides: dict(rule.words) for rule in kvpack.Recipe(name).rules}
        assert rules["v"]["norm"] == "log8"
        norms[own.bits] = rules["k"].get("norm")
    assert norms == {2: "log8", 3: None, 4: None}
    by_layer = kvpack.Recipe("kvpack-3", basis(LOSING))
    for layer in range(LAYERS):
        rule = [rule for rule in by_layer.rules if "k" in rule.sides and rule.covers(layer, LAYERS)][-1]
        words = dict(rule.words)
        assert ("norm" in words) == (int(words["b"]) <= MAX_LOG8_BITS)


@pytest.mark.parametrize("losses", ["1,2,3", "1,2,3,x", "1,2,3,-1", "1,2,3,1e400"])
def test_invalid_losses_are_refused(losses: str) -> None:
    with pytest.raises(InvalidHeader, match=r"model.losses.k is .*, expected 4 numbers such as"):
        kvpack.Recipe("kvpack-2", basis({LOSSES.format(side="k"): losses}))


@pytest.mark.parametrize("name", KVPACK_PRESETS)
def test_a_basis_given_at_any_time_gives_the_same_cache(name: str, tmp_path: Path) -> None:
    given, pairs = basis(LOSING), random_pairs(LAYERS, 40)
    path, plain, framed = tmp_path / "x.kvbasis", tmp_path / "plain.kvpack", tmp_path / "framed.kvpack"
    path.write_bytes(given.data)
    cache = kvpack.pack(pairs, kvpack.Recipe(name, given))
    assert cache.recipe == kvpack.Recipe(kvpack.Recipe(name), path).text == kvpack.Recipe(kvpack.Recipe(name, given)).text
    assert recipe_with_basis(name, path, None).text == cache.recipe
    kvpack.save(kvpack.pack(pairs, "bf16"), plain)
    assert kvpack.load(plain, recipe=name, basis=path).recipe == cache.recipe
    assert cli.main(["convert", str(plain), str(framed), "--recipe", name, "--basis", str(path)]) == 0
    loaded = kvpack.load(framed, basis=path)
    assert loaded.recipe == cache.recipe
    assert torch.equal(loaded[0].k.unpack(torch.float32), cache[0].k.unpack(torch.float32))


def test_a_basis_without_frames_changes_nothing() -> None:
    shapes = {(layer, side): (2, 64) for layer in range(2) for side in "kv"}
    found = Basis.from_bytes(random_basis(shapes, 2))
    assert kvpack.Recipe("kvpack-2", found) == kvpack.Recipe("kvpack-2")


def test_an_unused_basis_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="does not use one: omit basis"):
        recipe_with_basis("octopus-3", "x.kvbasis", None)
