"""A loaded cache continues with the encoder options of its recipe that are not in the header. No recipe text can do harm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvpack
from kvpack.cache.stored_layers import ENCODER_OPTIONS, with_encoder_options
from kvpack.coding.presets import PUBLISHED
from kvpack.coding.recipes import Recipe
from kvpack.formats import codec_from_params

if TYPE_CHECKING:
    from pathlib import Path

    from kvpack.formats.base import Codec

RECIPES = [
    "k=scalar:b=2,rounding=scaled;v=group:b=3,g=32,centre=zero",
    "kv=octahedral:b=2,rounding=scalar,norm_rule=norm",
    "octopus-2;layers=0,-1:k=scalar:b=2,norm_rule=norm",
    "turboquant-sym3-g4",
    "k=scalar:b=2,qjl=fp16,norm_rule=unbiased;v=scalar:b=2,sinks=2,norm_rule=norm",
    "octopus-2",
]


def pairs(tokens: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(1, 2, tokens, 64, generator=generator) for _ in "kv") for _ in range(3)]  # type: ignore[misc]


def test_recipes_set_encoder_options() -> None:
    assert ENCODER_OPTIONS["octahedral"] == {"rounding", "norm_rule"}
    assert ENCODER_OPTIONS["scalar"] == {"rounding", "norm_rule"}
    assert ENCODER_OPTIONS["group"] == {"centre", "norm_rule"}
    assert ENCODER_OPTIONS["raw"] == frozenset()


@pytest.mark.parametrize("recipe", RECIPES)
def test_tokens_appended_to_a_loaded_cache_are_encoded_as_before(recipe: str, tmp_path: Path) -> None:
    cache = kvpack.pack(pairs(32, 0), recipe)
    kvpack.save(cache, tmp_path / "x.kvpack")
    loaded = kvpack.load(tmp_path / "x.kvpack")
    kvpack.save(cache.append(pairs(32, 1)), tmp_path / "kept.kvpack")
    kvpack.save(loaded.append(pairs(32, 1)), tmp_path / "loaded.kvpack")
    assert (tmp_path / "kept.kvpack").read_bytes() == (tmp_path / "loaded.kvpack").read_bytes()


def test_a_conversion_that_keeps_codes_uses_the_new_encoder_options(tmp_path: Path) -> None:
    cache = kvpack.pack(pairs(32, 0), "kv=octahedral:b=2,norm_rule=norm").convert("kv=octahedral:b=2")
    kvpack.save(cache, tmp_path / "x.kvpack")
    loaded = kvpack.load(tmp_path / "x.kvpack")
    kvpack.save(cache.append(pairs(32, 1)), tmp_path / "kept.kvpack")
    kvpack.save(loaded.append(pairs(32, 1)), tmp_path / "loaded.kvpack")
    assert (tmp_path / "kept.kvpack").read_bytes() == (tmp_path / "loaded.kvpack").read_bytes()


def choice(codec: Codec) -> tuple[object, ...]:
    """Return the options with which ``codec`` selects raw tokens. Headers do not contain them."""
    raw = codec.raw_positions
    return () if raw is None else (raw.first, raw.low_norm, raw.high_norm)


@pytest.mark.parametrize("recipe", [*RECIPES, *PUBLISHED, "octopus-2;raw=9;layers=1:v=scalar:b=2,raw_low_norm=0.5"])
def test_codecs_from_a_header_get_the_recipes_encoder_options(recipe: str) -> None:
    parsed = Recipe(PUBLISHED[recipe].recipe if recipe in PUBLISHED else recipe)
    for layer in range(4):
        for side in "kv":
            expected: Any = parsed.codec(layer, 4, side, 128)
            found: Any = with_encoder_options(codec_from_params(expected.params()), parsed.text, layer, 4, side)
            assert found == expected
            assert choice(found) == choice(expected)
            for one, other in ((found, expected), (getattr(found, "codec", found), getattr(expected, "codec", expected))):
                assert {name: getattr(one, name, None) for name in ("centre", "norm_rule", "rounding")} == {
                    name: getattr(other, name, None) for name in ("centre", "norm_rule", "rounding")
                }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "norm_rule=norm",
        "k=scalar:norm_rule=no",
        "k=octahedral:b=2,norm_rule=norm",
        "layers=x:k=scalar:norm_rule=norm",
        "k=scalar:bits=9",
        "k=scalar:b=3;raw=4",
        "k=scalar:b=3;raw=4,x",
    ],
)
def test_unrelated_texts_change_nothing(text: str) -> None:
    codec: Any = Recipe("kv=scalar:b=3").codec(0, 1, "k", 64)
    assert with_encoder_options(codec, text, 0, 1, "k") is codec


@given(st.text(alphabet="kv=:;,-0123456789scalargroupnorm_rule unbiasedlayers"))
def test_any_text_is_tolerated(text: str) -> None:
    codec = Recipe("kv=scalar:b=3").codec(0, 1, "k", 64)
    assert with_encoder_options(codec, f"{text};k=scalar:b=3,norm_rule=norm", 0, 1, "k") == codec
