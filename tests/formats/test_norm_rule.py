"""Tests of norm_rule: products of tokens with their decoded values, the papers' rule, degenerate tokens, and storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpack.coding.presets import PUBLISHED
from kvpack.coding.recipes import Recipe
from kvpack.formats import codec_from_params
from kvpack.formats.base import Codec
from kvpack.formats.errors import InvalidParameter, ValueTooLarge
from kvpack.formats.norm_rule import NORM_RULES
from kvpack.formats.sidecars import CodecWithSidecars
from support.strategies import create

RECIPES = {
    "scalar:b=1": 128,
    "scalar:b=2": 64,
    "scalar:b=2,high=3,norm=fp32": 80,
    "scalar:b=7": 64,
    "octahedral:b=2": 128,
    "octahedral:b=3,arrangement=direct,norm=fp32": 64,
    "octahedral:b_dir=2,b_norm=0,rounding=scalar": 80,
    "quaternion:s=24,r=3": 128,
    "quaternion:s=5,r=2,norm=fp32,rotation=hadamard": 80,
    "polar:b=2": 128,
    "polar:b=4.2.2.2,norm=fp32": 128,
    "polar:b=3": 80,
    "angle:n=8": 128,
    "angle:n=64,norm=log3,range=fp32": 64,
    "angle:n=16,norm=fp32": 64,
    "group:b=2,token_scale=fp16": 64,
    "group:b=2,token_scale=fp32,axis=channel,rotation=hadamard": 80,
    "group:b=2,token_scale=fp16,scales=u8": 64,
}
"""Codecs whose products are unbiased, and a head dim for each."""


def made(words: str, dim: int, **more: str) -> Codec:
    codec_id, _, options = words.partition(":")
    return create(codec_id, dim, "k", **{**dict(option.split("=") for option in options.split(",")), **more})


def keys(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ratios(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """Return <x, decoded x> / |x|^2 for every token. For a group codec, both sums are over all heads."""
    axes = (1, 3) if codec.id == "group" else (3,)
    decoded = codec.decode(codec.encode(x)).double()
    return (x * decoded).sum(axes) / x.double().square().sum(axes)


@pytest.mark.parametrize(("words", "dim"), RECIPES.items())
def test_the_product_of_a_token_with_its_decoded_values_is_its_squared_norm(words: str, dim: int) -> None:
    x = keys(2, 3, 50, dim) * torch.exp2(torch.arange(50) % 9 - 4.0)[:, None]
    found = ratios(made(words, dim), x)
    # One rounding of the factor in binary16; the rotation and the sums in binary32 otherwise.
    assert found.mean().item() == pytest.approx(1, abs=2e-4)
    assert (found - 1).abs().max() < 2.0**-10
    papers = ratios(made(words, dim, norm_rule="norm"), x)
    assert (papers.mean() - 1).abs() > (found.mean() - 1).abs()


@pytest.mark.parametrize(("words", "dim"), RECIPES.items())
def test_codes_follow_the_papers_rule(words: str, dim: int) -> None:
    codec, x = made(words, dim), keys(1, 2, 40, dim)
    streams, papers = codec.encode(x), made(words, dim, norm_rule="norm").encode(x)
    changed = [name for name in streams if not torch.equal(streams[name], papers[name])]
    assert changed
    assert set(changed) <= {"norm", "scale", "radius", "range", "token_scale"}
    codec.check({name: stream.numpy() for name, stream in streams.items()}, "k")


@pytest.mark.parametrize(("words", "dim"), RECIPES.items())
def test_zero_tokens_decode_to_zeros(words: str, dim: int) -> None:
    codec, x = made(words, dim), keys(1, 2, 9, dim)
    x[:, :, 3] = 0
    assert not codec.decode(codec.encode(x))[:, :, 3].any()


@pytest.mark.parametrize("words", ["scalar:b=1", "scalar:b=3", "octahedral:b=2", "polar:b=2"])
def test_a_badly_encoded_token_keeps_its_norm(words: str) -> None:
    """Without a rotation, a token with one nonzero channel is far from all directions in the table.

    The unbiased factor would be many times its norm.
    """
    x = torch.zeros(1, 1, 1, 128)
    x[..., 5] = 2
    codec = made(words, 128, rotation="none")
    streams, papers = codec.encode(x), made(words, 128, rotation="none", norm_rule="norm").encode(x)
    assert all(torch.equal(stream, papers[name]) for name, stream in streams.items())


@pytest.mark.parametrize("words", ["scalar:b=1", "octahedral:b=2", "polar:b=2", "quaternion:s=1,r=2"])
def test_a_factor_beyond_the_range_becomes_the_largest_number(words: str) -> None:
    codec, x = made(words, 64), keys(1, 1, 1, 64)
    (name,) = codec.scale_layouts(1, 1, 1)
    norm = made(words, 64, norm="fp32", norm_rule="norm").encode(x)[name]
    x *= 65000 / norm.item()
    assert codec.encode(x)[name].item() == 65504
    with pytest.raises(ValueTooLarge, match="the largest float16 value is 65504"):
        codec.encode(x * 1.01)
    largest = made(words, 64, norm="fp32").encode(x / 65000 * 3.3e38)[name]
    assert torch.isfinite(largest).all()


@pytest.mark.parametrize("words", ["scalar:b=2", "octahedral:b=3", "quaternion:s=24,r=3", "polar:b=2"])
@pytest.mark.parametrize("size", [2.0**-128, 2.0**-100, 2.0**100], ids="{:.0e}".format)
def test_token_norms_do_not_matter(words: str, size: float) -> None:
    found = ratios(made(words, 64, norm="fp32"), keys(1, 1, 20, 64) * size)
    assert (found - 1).abs().max() < 1e-3


def test_the_rule_is_neither_stored_nor_compared() -> None:
    for words, dim in RECIPES.items():
        codec, papers = made(words, dim), made(words, dim, norm_rule="norm")
        assert codec == papers
        assert codec.params() == papers.params()
        assert not any("rule" in name for name in codec.params())
        assert rule(codec_from_params(papers.params())) == "unbiased"


def test_sketched_codecs_keep_the_papers_rule_by_default() -> None:
    """The sketch already makes products unbiased, and works better with a smaller residual."""
    one = made("scalar:b=2", 64, qjl="fp16")
    assert rule(one) == rule(codec_from_params(one.params())) == "norm"
    assert rule(made("scalar:b=2", 64, qjl="fp16", norm_rule="unbiased")) == "unbiased"


@pytest.mark.parametrize("sidecars", [{"outliers": "3"}, {"sinks": "2"}, {"channel_scale": "fp16"}], ids=str)
def test_sidecars_keep_products_unbiased(sidecars: dict[str, str]) -> None:
    x = keys(1, 2, 60, 64)
    x[..., 8:12] *= 4
    codec = made("scalar:b=2", 64, **sidecars)
    streams = codec.encode(x)
    if "channel_scale" in sidecars:
        # The product of what is rotated is right.
        x, decoded = (value / streams["channel_scale"].float() for value in (x, codec.decode(streams)))
    else:
        decoded = codec.decode(streams)
    assert (((x * decoded).sum(-1) / x.square().sum(-1)) - 1).abs().max() < 2.0**-9


def test_recipes_accept_the_rule() -> None:
    recipe = Recipe("k=octahedral:b=3,norm_rule=norm;v=scalar:b=3")
    assert [rule(recipe.codec(0, 1, side, 128)) for side in "kv"] == ["norm", "unbiased"]
    with pytest.raises(InvalidParameter, match="norm_rule is 'papers', expected one of unbiased, norm"):
        Recipe("kv=scalar:b=3,norm_rule=papers")


def test_presets_keep_products_unbiased() -> None:
    for name, preset in PUBLISHED.items():
        codecs = [Recipe(preset.recipe).codec(0, preset.layers or 1, side, preset.dim or 128) for side in "kv"]
        assert all(rule(codec) in (None, "norm" if "qjl" in name and codec.id != "group" else "unbiased") for codec in codecs), name


def test_unknown_rules_are_refused() -> None:
    codec: Any = made("scalar:b=2", 64)
    for known in NORM_RULES:
        replace(codec, norm_rule=known)
    with pytest.raises(InvalidParameter, match="norm_rule is 'other'"):
        replace(codec, norm_rule="other")


def rule(codec: Codec) -> str | None:
    inner = codec.codec if isinstance(codec, CodecWithSidecars) else codec
    return getattr(inner, "norm_rule", None)
