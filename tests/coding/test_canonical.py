"""Tests of canonical recipes: all spellings of a recipe have the same text, and different recipes have different texts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpack
from kvpack.coding.presets import ADDITIONS, PUBLISHED
from kvpack.coding.recipes import PRESETS, Recipe, canonical_recorded_text, parse_recipe
from kvpack.coding.recorded_presets import RECORDED
from kvpack.coding.rules import CALIBRATED
from kvpack.file.limits import MAX_STRING_BYTES
from kvpack.formats.errors import InvalidParameter

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("canonical", "spellings"),
    [
        (
            "k=octahedral:b=4;v=group:b=4",
            [
                "k=octahedral:b=4;v=group:b=4,g=32",
                " k=octahedral:b=4 ;  v=group:g=32,b=4",
                "v=group:b=4,g=32;k=octahedral:b_norm=3,b_dir=5",
                "k=octahedral:b=04,norm=fp16,rotation=signed-hadamard,seed=0,rounding=local3x3,norm_rule=unbiased;v=group:b=4,axis=channel",
                "kv=raw;kv=octahedral:b=4;v=group:b=4",
                "k=octahedral:b=4;v=group:b=4;tail=32;tail=0",
                "k=octahedral:b=4;v=group:b=4;layers=3,5-7:k=octahedral:b=4",
                "kv=raw;v=group:b=4;layers=0--1:k=octahedral:b=4",
                "kv=raw;layers=0,1--1:k=octahedral:b=4;layers=0--2,-1:v=group:b=4",
            ],
        ),
        ("kv=group:b=2", ["k=group:b=2;v=group:b=2", "k=group:b=2,axis=token;v=group:b=2,axis=channel"]),
        ("k=group:axis=channel,b=2;v=group:b=2", ["kv=group:b=2,axis=channel"]),
        ("kv=raw", ["raw", "k=raw;v=raw"]),
        ("kv=raw;layers=1--1:v=group:b=2", ["kv=raw;layers=2--1:v=scalar:b=2;layers=1--1:v=group:b=2"]),
        ("kv=raw;layers=0--2:v=group:b=2", ["kv=raw;layers=0--3:v=scalar:b=2;layers=0--2:v=group:b=2"]),
        ("kv=raw:dtype=bf16", ["bf16"]),
        ("kv=klt:bits=2", ["kv=klt", "kv=klt:gain=fp16", "kv=klt:bits=02.000,rows=basis,widths=shared"]),
        ("kv=klt:bits=2,widths=heads", ["kv=klt:widths=heads"]),
        (
            "kv=klt:bits=2,widths=heads;raw=1,0.6,4",
            [
                "klt-2",
                "klt-2.0",
                "kv=klt:raw_high_norm=4.0,raw_low_norm=.60,raw_first=1,raw_dtype=bf16,widths=heads",
                "raw=1,0.6,4;kv=klt:widths=heads",
                "klt-2;layers=3:v=klt:bits=2,widths=heads",
            ],
        ),
        (
            "k=octahedral:b=3,mean=32,mean_bits=4,norm=log8;v=group:b=3;raw=4,0.5,4",
            ["octopus-3", "octopus-3;raw=9;raw=4,0.5,4,bf16", "octopus-3;octopus-3"],
        ),
        (
            "k=octahedral:b=3,mean=32,mean_bits=4,norm=log8;v=group:b=3",
            ["octopus-3;raw=0", "octopus-3;raw=0,0,0,0", "raw=0;k=octahedral:norm=log8,b=3,mean_bits=4,mean=32;v=group:b=3"],
        ),
        (
            "k=octahedral:b=3,raw_first=2;v=group:b=3,raw_first=4",
            ["octopus-3;raw=4;k=octahedral:b=3,raw_first=2", "k=octahedral:b=3,raw_first=2;v=group:b=3;raw=4"],
        ),
        (
            "k=raw;v=scalar:b=2;raw=0,0.5,0,fp16",
            ["k=raw;v=scalar:b=2,raw_low_norm=0.5,raw_dtype=fp16", "raw=0,.5,0,fp16;k=raw;v=scalar:b=2"],
        ),
        ("kv=raw:dtype=bf16", ["bf16;raw=4", "octopus-3;kv=raw:dtype=bf16", "kivi-2;layers=0--1:kv=raw:dtype=bf16"]),
        ("kv=scalar:b=2;layers=0:k=scalar:b=2,raw_first=1", ["raw=1;kv=scalar:b=2;raw=0;layers=0:k=scalar:b=2,raw_first=1"]),
        (
            f"kv=klt:basis={DIGEST},bits=1.75",
            [f"kv=klt:bits=1.750,basis={DIGEST}", f"k=klt:basis={DIGEST},bits=1.75;v=klt:basis={DIGEST},bits=1.75"],
        ),
        (
            "k=scalar:b=2,mean=32,mean_bits=4,norm=log8,qjl=fp16;v=group:b=3",
            ["turboquant-qjl-3;raw=0", "v=group:b=3;k=scalar:qjl_seed=1,qjl=fp16,mean_bits=4,mean=32,norm=log8,b=2,norm_rule=norm"],
        ),
        ("kv=scalar:b=2,sinks=4", ["kv=scalar:b=2,raw_tokens=bf16,sinks=4"]),
        ("kv=lossless:chunk=256,dtype=bf16", ["kv=lossless:dtype=bf16,chunk=256"]),
        ("kv=octahedral:b_dir=4,b_norm=1", ["kv=octahedral:b=3,b_norm=1", "kv=octahedral:b_norm=1,b_dir=4,b=7"]),
        (
            "kv=group:b=2;layers=0-5,9,-1:k=raw;tail=32",
            [
                "tail=32;kv=group:b=2;layers=-1:k=raw;layers=9,3-5:k=raw;layers=0-3:k=raw",
                "kivi-2;raw=0;layers=0-9:k=raw;layers=6-8:k=group:b=2;layers=-1:k=raw;tail=32",
                "raw=0,0;kv=group:b=2;layers=0-5:k=scalar:b=2;layers=9:k=raw;layers=-1:k=raw;layers=0-5:k=raw;tail=0;tail=32",
            ],
        ),
        (
            "kv=group:b=2;layers=0,-1:kv=raw;raw=4,0.5,4",
            ["kivi-2;layers=0,-1:k=raw;layers=-1:v=raw;layers=0:v=raw", "kivi-2;layers=0:kv=raw;layers=-1:kv=raw"],
        ),
        (
            "kv=group:b=2;layers=0:k=raw;layers=1:kv=scalar:b=2;raw=4,0.5,4",
            ["kivi-2;layers=1:v=scalar:b=2;layers=0-1:k=raw;layers=1:k=scalar:b=2", "kivi-2;layers=1:kv=scalar:b=2;layers=0:k=raw"],
        ),
    ],
)
def test_equivalent_spellings_have_the_same_text(canonical: str, spellings: list[str]) -> None:
    for spelling in [canonical, *spellings]:
        assert Recipe(spelling).text == Recipe(spelling).canonical == canonical, spelling
    assert {Recipe(spelling) for spelling in spellings} == {Recipe(canonical)}
    assert len({kvpack.Identity("m", spelling).digest for spelling in [canonical, *spellings]}) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # In a cache of one layer, the later clause wins.
        ("kivi-2;layers=0:k=raw;layers=-1:k=scalar:b=2", "kivi-2;layers=-1:k=scalar:b=2;layers=0:k=raw"),
        ("kivi-2;layers=3:k=raw;layers=-1:k=group:b=2", "kivi-2;layers=3:k=raw"),
        ("kivi-2;layers=-1:k=raw", "kivi-2;layers=3:k=raw"),
        # Encoders' options change bytes, though no header holds them.
        ("kv=octahedral:b=2", "kv=octahedral:b=2,rounding=scalar"),
        ("kv=octahedral:b=2", "kv=octahedral:b=2,norm_rule=norm"),
        ("kv=scalar:b=2,sinks=4", "kv=scalar:b=2,sinks=5"),
        ("kv=group:b=2", "kv=group:b=2,centre=zero"),
        # What is left out depends on the values or on the head dim.
        ("kv=raw", "kv=raw:dtype=bf16"),
        ("kv=lossless", "kv=lossless:dtype=bf16"),
        ("kv=lossless", "kv=lossless:chunk=256"),
        ("kv=transform", "kv=transform:chunk=256"),
        ("kv=klt:widths=heads", "kv=klt:gain=fp16,widths=heads"),
        ("kv=klt:widths=heads", "kv=klt:gain=none,widths=heads"),
        ("klt-2", "kv=klt:widths=heads"),
        ("kv=klt", "klt-2"),
        ("kv=group:b=2;tail=32", "kv=group:b=2;tail=64"),
        ("klt-2", f"kv=klt:basis={DIGEST}"),
    ],
)
def test_different_recipes_have_different_texts(first: str, second: str) -> None:
    assert Recipe(first).text != Recipe(second).text
    assert Recipe(first) != Recipe(second)


@pytest.mark.parametrize("name", [*PRESETS, *(f"octopus-3;{name}" for name in ADDITIONS), "klt-1.75", "transform-0.6"])
def test_preset_names_are_not_recorded(name: str) -> None:
    text = Recipe(name).text
    assert name not in text.split(";")
    assert all("=" in clause for clause in text.split(";"))
    assert Recipe(text).text == text
    assert parse_recipe(name) == parse_recipe(f" {name} ") == parse_recipe(PRESETS.get(name, text)) == parse_recipe(text)


WORDS = {
    "raw": ("dtype=bf16", "dtype=fp16"),
    "lossless": ("dtype=bf16", "chunk=64", "chunk=256"),
    "group": (
        "b=2", "b=3", "g=32", "g=64", "axis=token", "axis=channel", "centre=zero", "centre=middle", "token_scale=fp16", "seed=0", "seed=00",
    ),
    "minifloat": ("element=e4m3", "element=e2m1", "scales=e8m0", "per=block", "per=tensor", "per=head"),
    "scalar": (
        "b=2", "b=3", "high=4", "share=32", "norm=fp16", "norm_rule=norm", "norm_rule=unbiased", "qjl=fp16", "qjl_seed=1", "sinks=2",
        "raw_tokens=bf16",
    ),
    "octahedral": ("b=2", "b=3", "b_dir=4", "b_norm=2", "rounding=scalar", "rounding=local3x3", "channel_scale=fp16", "outliers=3"),
    "polar": ("b=3", "b=3.3.2", "rotation=none", "rotation=signed-hadamard"),
    "klt": ("bits=2", "bits=2.50", "raw_first=4", "raw_low_norm=0.6", "gain=fp16", "gain=none", "rows=fp16", "widths=heads"),
    "trellis": ("b=2", "b=3", "states=256", "states=1024", "norm_rule=norm"),
    "transform": ("bits=0.6", "bits=1", "chunk=256"),
}  # fmt: skip


def clauses() -> st.SearchStrategy[str]:
    codecs = st.sampled_from(sorted(WORDS)).flatmap(
        lambda name: st.lists(st.sampled_from(WORDS[name]), unique_by=lambda word: word.partition("=")[0], max_size=4).map(
            lambda words: f"{name}:{','.join(words)}" if words else name
        )
    )
    # Few codecs, so that clauses of one codec meet.
    common = st.sampled_from(["raw", "group:b=2", "group:g=32,b=2", "scalar:b=2"])
    ends = st.integers(-4, 4)
    items = st.one_of(ends.map(str), st.tuples(ends, ends).map(lambda pair: f"{pair[0]}-{pair[1]}"))
    layers = st.one_of(st.just(""), st.lists(items, min_size=1, max_size=3).map(lambda found: f"layers={','.join(found)}:"))
    sides = st.sampled_from(["k", "v", "kv"])
    named = st.sampled_from([*ADDITIONS, "octopus-2", "kivi-2", "tail=64", "tail=0"])
    return st.one_of(st.tuples(layers, sides, st.one_of(common, codecs)).map(lambda it: f"{it[0]}{it[1]}={it[2]}"), named)


def recipes() -> st.SearchStrategy[Recipe]:
    def made(base: str, more: list[str]) -> Recipe | None:
        try:
            return Recipe(";".join([base, *more]))
        except InvalidParameter:
            return None

    found = st.builds(made, st.sampled_from(["kv=raw", "kivi-2", "octopus-2"]), st.lists(clauses(), max_size=6))
    return found.filter(lambda recipe: recipe is not None)  # type: ignore[return-value]


def everything(codec: Any) -> Any:
    """Return all fields of a codec, including those that are neither stored in headers nor compared for equality."""
    if not dataclasses.is_dataclass(codec):
        return codec
    found = [everything(getattr(codec, field.name)) for field in dataclasses.fields(codec)]
    return [type(codec), *([everything(it) for it in value] if isinstance(value, tuple) else value for value in found)]


def codecs(recipe: Recipe, layers: int, dim: int) -> Any:
    """Return every codec of a cache. ``klt`` and ``transform`` have no basis here."""
    found = []
    for layer in range(layers):
        for side in "kv":
            rule = next(rule for rule in reversed(recipe.rules) if side in rule.sides and rule.covers(layer, layers))
            found.append([everything(rule.codec(dim, side, dtype)) for dtype in ("bf16", "fp16")])
            if rule.codec_id in CALIBRATED:
                words = dict(rule.words)
                found[-1] += [rule.bits, words.get("basis"), words.get("widths", "shared")]
    return found


@given(recipes())
def test_the_canonical_text_gives_the_same_codecs(recipe: Recipe) -> None:
    again = Recipe(recipe.text)
    assert again.text == recipe.text
    assert again.window == recipe.window
    for layers in (1, 2, 3, 5, 9, 12):
        for dim in (64, 256):
            assert codecs(again, layers, dim) == codecs(recipe, layers, dim), (recipe, layers)


@given(recipes(), st.randoms(use_true_random=False))
def test_clauses_in_any_irrelevant_order_have_the_same_text(recipe: Recipe, random: Any) -> None:
    """Clauses may name one layer and side each, in any order, with their options in any order, and may follow other codecs."""
    layers, written = 9, []
    for layer in range(layers):
        for side in "kv":
            rule = next(rule for rule in reversed(recipe.rules) if side in rule.sides and rule.covers(layer, layers))
            words = [f"{name}={value}" for name, value in rule.words]
            random.shuffle(words)
            written.append(f"layers={layer}:{side}={rule.codec_id}{':' if words else ''}{','.join(words)}")
    texts = set()
    for _ in range(3):
        random.shuffle(written)
        texts.add(Recipe(";".join(["kv=raw:dtype=fp32", *written])).text)
    assert len(texts) == 1


def test_a_window_is_recorded_as_a_tail() -> None:
    recipe = Recipe("kv=group:b=2,g=32;window=64")
    assert recipe == Recipe("kv=group:b=2,g=32;tail=64") == Recipe("kv=group:b=2,g=32;window=96;tail=64")
    assert (recipe.window, recipe.text) == (64, "kv=group:b=2;tail=64")


def test_texts_fit_headers() -> None:
    assert max(len(Recipe(name).text) for name in PRESETS) < 256
    every = ";".join(f"layers={layer}:kv=group:b={2 + layer % 3},g=32,axis=channel" for layer in range(64))
    assert len(Recipe(f"kivi-2;{every}").text) < MAX_STRING_BYTES / 4


def test_recorded_names_keep_their_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(RECORDED) <= {*PUBLISHED, *ADDITIONS}
    assert Recipe.from_recorded("octopus-4").canonical == "k=octahedral:b=4;v=group:b=4"
    assert Recipe.from_recorded("octopus-3;boundary-1;tail=32").canonical == "k=octahedral:b=3;v=group:b=3;layers=0,-1:k=raw;tail=32"
    recorded = Recipe.from_recorded("octopus-4")
    assert recorded.text == "octopus-4"
    assert recorded == Recipe(RECORDED["octopus-4"])
    assert recorded.codec(0, 2, "k", 64) == Recipe(RECORDED["octopus-4"]).codec(0, 2, "k", 64)
    for name in RECORDED.keys() - ADDITIONS.keys():
        assert Recipe.from_recorded(name) == Recipe(RECORDED[name])
    assert canonical_recorded_text("no recipe") == "no recipe"
    assert canonical_recorded_text("octopus-4 ") == recorded.canonical
