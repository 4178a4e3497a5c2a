"""Tests of ``Cache.select``, which reorders, repeats or omits the sequences of a packed batch."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvpack
from kvpack.cache.packed_runs import PackedRuns
from kvpack.cache.side import Side
from kvpack.coding.encoding import RAW_DTYPES
from kvpack.coding.presets import PUBLISHED
from kvpack.file.container import open_file
from kvpack.formats import CODECS
from kvpack.formats.errors import InvalidParameter, OutOfBounds
from support.klt_bases import random_basis
from support.sidecar_recipes import RECIPES as SIDECARS
from support.sidecar_recipes import attention, relative_error
from support.strategies import create

# The values have large tokens and channels on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*lose precision:kvpack.KvpackWarning")

CHOICES = {"reorder": [2, 0, 1], "repeat": [1, 1, 0, 2, 2, 1], "select": [2]}
# The first of the presets that differ in numbers alone. Those that change some of a model's layers change the first of two: the others of
# the model have the same codecs.
KINDS = {re.sub(r"=[\d.,-]+", "=", preset.recipe): name for name, preset in reversed(PUBLISHED.items())}
RECIPES = {
    **{name: re.sub(r"layers=[-0-9,]+:", "layers=0:", PUBLISHED[name].recipe) for name in reversed(KINDS.values())},
    **SIDECARS,
    "trellis": "kv=trellis:b=2,states=256",
    "a window": "k=raw:dtype=fp32;v=group:b=2,g=32,sinks=2;tail=64",
    "klt": "kv=klt:bits=4,rows=fp16",
    "transform": "kv=transform:bits=4,chunk=16",
}


@cache
def recipe_of(name: str) -> str | kvpack.Recipe:
    """Return the recipe with this name, with a basis if it needs one."""
    if name not in ("klt", "transform"):
        return RECIPES[name]
    shapes = {(0, side): (2, 64) for side in "kv"}
    scopes = {(0, "k"): "layer", (0, "v"): "head"}
    return kvpack.Recipe(RECIPES[name], kvpack.Basis.from_bytes(random_basis(shapes, 1, scopes=scopes)))


def shape_of(name: str) -> tuple[int, int]:
    preset = PUBLISHED.get(name)
    return (2 if "layers=" in RECIPES[name] else 1, preset.dim or 128 if preset else 64)


def pairs(name: str, tokens: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of a batch of 3 sequences with different outliers, sinks, and tokens of low norm."""
    layers, dim = shape_of(name)
    generator = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(layers):
        x = torch.randn(2, 3, 2, tokens, dim, generator=generator)
        for sequence in range(3):
            x[:, sequence, :, sequence :: 7 + sequence, 4 * sequence] *= 40
            x[:, sequence, :, 2 * sequence + 1 :: 31] *= 0.01
        x = x.to(torch.bfloat16 if name == "lossless" else RAW_DTYPES.get(name, torch.float32))
        result.append((x[0], x[1]))
    return result


@cache
def packed(name: str) -> kvpack.Cache:
    """Return a cache with pages of several sizes and, if the recipe has a window, a tail."""
    recipe = recipe_of(name)
    whole = kvpack.pack(pairs(name, 96, 1), recipe)
    for tokens, seed in ((37, 2), (1, 3)):
        whole = whole.append(pairs(name, tokens, seed))
    return whole


def values(whole: kvpack.Cache) -> list[torch.Tensor]:
    return [x for pair in whole.unpack(torch.float32) for x in pair if x is not None]


@cache
def values_of(name: str) -> list[torch.Tensor]:
    return values(packed(name))


def same(found: kvpack.Cache, expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(values(found), expected, strict=True))


@pytest.mark.scenario
@pytest.mark.parametrize(("name", "chosen_by"), list(zip(RECIPES, itertools.cycle(CHOICES), strict=False)))
def test_values_of_selected_rows_are_unchanged_bit_for_bit(name: str, chosen_by: str, tmp_path: Path) -> None:
    whole, choice = packed(name), CHOICES[chosen_by]
    expected = [x[choice] for x in values_of(name)]
    chosen = whole.select(choice)
    assert same(chosen, expected)
    assert (chosen.tokens, chosen.recipe, chosen[0].k.batch) == (whole.tokens, whole.recipe, len(choice))
    path = tmp_path / "x.kvpack"
    assert kvpack.save(chosen, path) == chosen.nbytes
    open_file(path).verify()
    recipe = recipe_of(name)
    loaded = kvpack.load(path, basis=recipe.basis if isinstance(recipe, kvpack.Recipe) else None)
    assert same(loaded, expected)
    assert same(loaded[:, :96], [x[:, :, :96] for x in expected])
    q = torch.randn(len(choice), 4, 2, expected[0].shape[3], generator=torch.Generator().manual_seed(9))
    assert relative_error(kvpack.attend(q, loaded[0]), attention(q, *expected[:2])) < 1e-5


@pytest.mark.scenario
@pytest.mark.parametrize("name", RECIPES)
def test_appending_after_and_before_selection_agree(name: str) -> None:
    whole, new, choice = packed(name), pairs(name, 70, 5), [2, 0, 2]
    grown = whole.select(choice).append([(k[choice], v[choice]) for k, v in new])
    assert same(grown[:, :96], [x[choice, :, :96] for x in values_of(name)])
    expected = values(whole.append(new).select(choice))
    if "outliers" in kvpack.Recipe(RECIPES[name]).text or "med3" in name:
        # What is an outlier depends on the other sequences of the batch.
        assert all(relative_error(*both) < 0.5 for both in zip(values(grown), expected, strict=True))
    else:
        assert same(grown, expected)


def test_recipes_cover_every_codec_and_every_stream_without_a_batch_axis() -> None:
    sides = [side for name in RECIPES for layer in packed(name) for side in layer.sides.values()]
    assert {side.codec.id for side in sides} == set(CODECS)
    without = set()
    for side in sides:
        for name, layout in side.codec.layout(5, 2, 3).items():
            assert layout.batch_axis in (0, None)
            assert (layout.shape[0] == 5) == (layout.batch_axis == 0), name
            if layout.batch_axis is None:
                assert layout.per == "entry"
                assert any(page.streams[name].shape[2] for page in side.runs)
                without.add(name)
    assert without == {"outliers", "raw_tokens", "raw_positions", "raw_values", "words"}


@pytest.mark.parametrize("name", ["raw tokens", "outliers", "all"])
def test_entries_keep_the_order_of_the_format(name: str) -> None:
    """Selecting sequences one at a time or all at once stores the same bytes, because the order of a file's entries is fixed."""
    whole = packed(name)
    counts = [count for page in whole[0].k.runs for count in page.codec.entries(page.streams).values()]
    assert any((count[:, 0] != count[:, 1]).any() for count in counts)
    twice = whole.select([2, 0, 1]).select([1, 2, 0])
    for page, other in zip(whole[0].k.runs, twice[0].k.runs, strict=True):
        assert page.streams.keys() == other.streams.keys()
        assert all(torch.equal(page.streams[stream], other.streams[stream]) for stream in page.streams)
    assert same(whole.select([0]), [x[:1] for x in values(whole)])


@pytest.mark.parametrize("name", ["raw tokens", "all"])
def test_side_layer_and_cache_select_alike_and_leave_the_original_unchanged(name: str) -> None:
    whole = packed(name)
    before = [x.clone() for x in values(whole)]
    k, v = whole[0].select([1, 0]).unpack(torch.float32)
    assert torch.equal(k, before[0][[1, 0]])
    assert torch.equal(v, before[1][[1, 0]])
    assert torch.equal(whole[0].v.select([1, 0]).unpack(torch.float32), v)
    assert same(whole, before)
    assert whole[0].k.select([0, 1, 2]) is whole[0].k


@pytest.mark.parametrize(
    "indices",
    [torch.tensor([2, 0]), torch.tensor([2, 0], dtype=torch.int32), np.array([2, 0]), (2, 0), iter([2, 0]), [np.int64(2), torch.tensor(0)]],
    ids=["tensor", "int32", "numpy", "tuple", "iterator", "scalars"],
)
def test_indices_of_any_integer_dtype(indices: Any) -> None:
    assert same(packed("all").select(indices), [x[[2, 0]] for x in values(packed("all"))])


def test_a_slice_of_a_page_can_be_selected() -> None:
    whole = packed("all")
    part = whole[:, 32:70].select([2, 2, 0])
    assert same(part, [x[[2, 2, 0], :, 32:70] for x in values(whole)])


def test_works_in_inference_mode_and_autocast() -> None:
    with torch.inference_mode(), torch.autocast("cpu"):
        chosen = packed("all").select([1, 0])
    assert not any(stream.is_inference() for page in chosen[0].k.runs for stream in page.streams.values())
    assert same(chosen, [x[[1, 0]] for x in values(packed("all"))])


@pytest.mark.parametrize("indices", [[-1], [0, 3], torch.tensor([0, 7])], ids=str)
def test_rows_outside_the_batch_are_refused(indices: Any) -> None:
    row = int(indices[-1])
    with pytest.raises(OutOfBounds, match=rf"sequence {row} was requested from a batch of 3 sequences, expected an index from 0 to 2$"):
        packed("all").select(indices)


WRONG = {
    "a row alone": (0, r"indices is 0, expected .* select\(\[0, 2\]\)"),
    "text": ("0", "indices is '0'"),
    "None": (None, "indices is None"),
    "a mask": ([True, False, True], "indices contains True, expected integers, such as"),
    "a mask tensor": (torch.tensor([True, False]), "indices contains True"),
    "floats": (torch.tensor([0.0, 1.0]), "indices contains 0.0"),
    "rank 2": (torch.zeros(1, 2, dtype=torch.int64), r"indices is a tensor of shape \[1, 2\], expected .* rank 1"),
    "none": ([], "pass at least one"),
}


@pytest.mark.parametrize(("indices", "message"), WRONG.values(), ids=WRONG)
def test_invalid_lists_of_rows_are_refused(indices: Any, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        packed("all").select(indices)


def test_an_empty_side_is_decoded_quickly_for_any_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header may declare any number of sequences and heads if no token has values."""
    side = Side(create("raw", 16, dtype="fp16"), PackedRuns(), torch.empty(65536, 65536, 0, 16, dtype=torch.bfloat16), 0)
    monkeypatch.setattr(Side, "select", None)
    assert side.unpack().shape == (65536, 65536, 0, 16)
    assert side.norms().shape == (65536, 65536, 0)
