"""Tests of recipes: the grammar, the presets, and error messages that point at the invalid word."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpack.coding.presets import KVPACK_PRESETS
from kvpack.coding.recipes import PRESETS, Recipe, parse_recipe, preset_name
from kvpack.formats.errors import InvalidParameter, KvpackError, OutOfBounds


@pytest.mark.parametrize("name", PRESETS)
def test_presets_give_a_codec_for_every_head_dim(name: str) -> None:
    recipe = parse_recipe(name)
    for dim in (64, 80, 96, 112, 128, 192, 256):
        if "block_rotation=32" in PRESETS[name] and dim % 32:
            with pytest.raises(InvalidParameter, match="block_rotation is 32, expected a divisor of the head dim"):
                recipe.codec(0, 4, "k", dim)
            continue
        for side in "kv":
            assert recipe.codec(0, 4, side, dim).dim == dim


def test_later_clauses_win_and_layers_count_from_the_end() -> None:
    recipe = Recipe("kivi-2;layers=0,-1:k=raw:dtype=fp16;layers=1-2:kv=group:b=5")
    found = [[recipe.codec(layer, 4, side, 64).params() for side in "kv"] for layer in range(4)]
    assert [params[0]["id"] for params in found] == ["raw", "group", "group", "raw"]
    assert [params[1]["bits"] for params in found] == [2, 5, 5, 2]
    assert Recipe("kivi-2;layers=-2--1:k=raw").codec(3, 4, "k", 64).id == "raw"


def test_an_addition_changes_the_clauses_before_it() -> None:
    recipe = Recipe("octopus-3;boundary-1;tail=32")
    found = [[recipe.codec(layer, 4, side, 64).id for side in "kv"] for layer in range(4)]
    assert found == [["raw", "group"], ["octahedral", "group"], ["octahedral", "group"], ["raw", "group"]]
    assert recipe.window == 32
    assert Recipe("kivi-2-g128").window == 128
    assert Recipe("kivi-2-g128;tail=0").window == 0


def test_every_lossy_preset_keeps_tokens_raw() -> None:
    for name in PRESETS:
        for side in "kv":
            codec = Recipe(name).codec(0, 4, side, 64)
            raw = codec.raw_positions
            assert (raw is None) == (codec.exact_dtype is not None), name
            expected = ("bf16", 1, 0.4, 4.0) if name in KVPACK_PRESETS else ("bf16", 4, 0.5, 4.0)
            assert raw is None or (raw.dtype, raw.first, raw.low_norm, raw.high_norm) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("octopus-3;raw=", "raw_first is '', expected an integer from 1 to 65536"),
        ("octopus-3;raw=4,2", "raw_low_norm is '2', expected a number above 0 and below 1"),
        ("octopus-3;raw=4,0.6,1", "raw_high_norm is '1', expected a number above 1"),
        ("octopus-3;raw=4,0,0,fp8", "raw_dtype is 'fp8', expected one of"),
        ("octopus-3;raw=0,0,0,fp16", "raw_dtype=fp16 has no effect without raw_first"),
        ("octopus-3;raw=4,0.5,4,bf16,0", "has 5 values, expected up to 4"),
    ],
)
def test_a_clause_about_raw_tokens_is_checked(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message) as caught:
        Recipe(text)
    assert "such as raw=4,0.5,4" in str(caught.value) or "raw_dtype=fp16" in message


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("boundary-1;octopus-3", "boundary-1"),
        ("octopus-3;boundary-1;k=raw", "boundary-1"),
        ("layers=0:kv=raw;kivi-2", "layers=0:kv=raw"),
        ("kivi-2;layers=0:v=raw;tail=32;v=raw", "layers=0:v=raw"),
    ],
)
def test_an_ineffective_clause_is_refused(text: str, word: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        Recipe(text)
    first, recipe, carets = str(caught.value).splitlines()
    assert f"{word!r} has no effect" in first
    assert recipe[carets.index("^") : carets.rindex("^") + 1] == word


def test_a_second_preset_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="already names 'kvpack-3', and a recipe can name only one preset"):
        Recipe("kvpack-3;boundary-1;kvpack-4")


def test_combining_codecs_of_two_presets_works_as_the_error_suggests() -> None:
    with pytest.raises(InvalidParameter, match=r"unknown codec 'kvpack-4': it is a preset, .*: write k=") as caught:
        Recipe("k=kvpack-4;v=kvpack-3")
    clause, raw = re.findall(r"write (k=\S+), and add the clause '(.*)'", str(caught.value))[0]
    with pytest.raises(InvalidParameter, match=r"unknown codec 'kvpack-3'") as caught:
        Recipe(f"{clause};v=kvpack-3;{raw}")
    other = re.findall(r"write (v=\S+), and", str(caught.value))[0]
    keys, values = (Recipe(f"kvpack-{bits}").codec(0, 2, side, 64) for bits, side in ((4, "k"), (3, "v")))
    mixed = Recipe(f"{clause};{other};{raw}")
    assert (mixed.codec(0, 2, "k", 64), mixed.codec(0, 2, "v", 64)) == (keys, values)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_recognized_by_their_text(name: str) -> None:
    assert preset_name(Recipe(name).canonical) == name


def test_a_partially_changed_preset_is_accepted() -> None:
    assert Recipe("kivi-2;layers=0:kv=raw;v=group:b=4").codec(0, 2, "k", 64).id == "raw"
    assert Recipe("mixedkv-mistral-7b;k=raw").codec(0, 32, "v", 64).params()["bins"] == 128


def test_group_axis_depends_on_the_side() -> None:
    recipe = Recipe("kv=group:b=2")
    assert recipe.codec(0, 1, "k", 64).params()["axis"] == "token"
    assert recipe.codec(0, 1, "v", 64).params()["axis"] == "channel"


REFUSED = [
    ("", "", "unknown word"),
    ("octopuss-3", "octopuss-3", "did you mean octopus-3?"),
    ("KVPACK-4", "KVPACK-4", "did you mean kvpack-4?"),
    ("q4", "q4", "expected a preset, such as kvpack-4 (kvpack recipes lists them), or a clause of k="),
    ("kivi-2;k=grp:b=2", "grp", "expected one of"),
    ("kivi-2;k=GROUP:b=2", "GROUP", "did you mean group?"),
    ("k=octahedral:b=3,v=group:b=3,g=32", "v=group:b=3", "semicolons separate clauses: write 'k=octahedral:b=3;v=group:b=3,g=32'"),
    ("octopus-3,tail=32", "octopus-3,tail", "semicolons separate clauses: write 'octopus-3;tail=32'"),
    ("k=octahedral:b=3;v=group:b=3,raw=4", "raw=4", "raw= begins a clause, and semicolons separate clauses"),
    ("kv=kvpack-4", "kvpack-4", "selects the codecs of keys and values: write 'kvpack-4' as a clause"),
    ("kivi-2;layers=0:v=octopus-3", "octopus-3", "write layers=0:v=group:b=3,g=32, and add the clause 'raw=4,0.5,4'"),
    (
        "kvpack-3;layers=0-9:kv=oscar-2", "oscar-2",
        "write layers=0-9:k=group:b=2,g=32,rotation=hadamard,token_scale=fp16;layers=0-9:v=group:b=2,g=32,rotation=hadamard, and add the",
    ),
    ("kivi-2;q=group:b=2", "q", "unknown word 'q'"),
    ("kivi-2;k=group:b=9", "b=9", "from 1 to 8"),
    ("kivi-2;k=group", "group", "needs b="),
    ("kivi-2;k=group:b", "b", "must be written <name>=<value>"),
    ("kivi-2;k=group:b=2,z=1", "z=1", "its options are b, g"),
    ("kivi-2;k=group:b=2,b=3", "b=3", "given twice"),
    ("kivi-2;k=group:b=2,g=48", "g=48", "4, 8, 16, 32, 64, 128"),
    ("kivi-2;layers=x:k=raw", "x", "must be an integer or a range first-last"),
    ("kivi-2;layers=1", "layers=1", "a layers clause has no codec: write layers=<list>"),
    ("kivi-2;layers=2-1:k=raw", "2-1", "the range 2-1 ends before it begins: write 1-2"),
    ("kivi-2;layers=-1--2:k=raw", "-1--2", "the range -1--2 ends before it begins: write -2--1"),
    ("kivi-2;layers=" + "1" * 5000 + ":k=raw", "1" * 5000, "must be an integer or a range first-last"),
    ("kivi-2;layers=\u0663:k=raw", "\u0663", "must be an integer or a range first-last"),
    ("kivi-2;tail=" + "3" * 5000, "tail=" + "3" * 5000, "from 0 to"),
    ("kivi-2;tail=-1", "tail=-1", "from 0 to"),
    ("kivi-2;tail=33", "tail=33", "must be a multiple of 32"),
]


@pytest.mark.parametrize(("text", "word", "message"), REFUSED, ids=[text[:40] or "empty" for text, _, _ in REFUSED])
def test_an_error_points_at_the_word_and_lists_known_ones(text: str, word: str, message: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        Recipe(text)
    lines = str(caught.value).splitlines()
    assert message in lines[0]
    if word:
        recipe, carets = lines[-2:]
        start = carets.index("^")
        assert recipe[start : start + carets.count("^")] == word


@pytest.mark.parametrize("recipe", [None, b"kivi-2"], ids=str)
def test_non_string_recipes_are_refused(recipe: object) -> None:
    with pytest.raises(InvalidParameter, match=r"got a (NoneType|bytes)"):
        parse_recipe(recipe)


def test_a_side_without_a_codec_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="has no codec for values"):
        Recipe("k=group:b=2")
    with pytest.raises(InvalidParameter, match="has no codec for keys"):
        Recipe("v=raw;layers=0:k=raw")


def test_layers_outside_the_cache_are_refused() -> None:
    Recipe("kivi-2;layers=0,-4:k=raw").check_layers(4)
    Recipe("kivi-2;layers=1--2:k=raw").check_layers(2)
    for text in ("kivi-2;layers=4:k=raw", "kivi-2;layers=-5:k=raw", "kivi-2;layers=0-9:k=raw"):
        with pytest.raises(OutOfBounds, match="the cache has only 4 layers"):
            Recipe(text).check_layers(4)


@given(st.text(alphabet="kv=;:,-0129abgroupwlaystein. ", max_size=40))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        recipe = Recipe(text)
    except KvpackError:
        return
    assert recipe.codec(0, 1, "k", 64).dim == 64


def test_caches_with_the_same_recipe_share_its_codecs() -> None:
    first, second = (parse_recipe("octopus-3;tail=64").codec(0, 2, "k", 64) for _ in range(2))
    assert first is second
    for _ in range(2):
        with pytest.raises(InvalidParameter, match="octopus-0"):
            parse_recipe("octopus-0")
