"""Tests of the warning that ``pack`` gives about key channels that are too large for a codec with a rotation."""

from __future__ import annotations

import warnings

import pytest
import torch

import kvpack
from kvpack.cache.packing import MAX_CHANNEL_RATIO

LAYERS, HEADS, DIM = 3, 2, 64


def pairs(factor: float, channel: int = 5, tokens: int = 300) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys with one RoPE pair that is ``factor`` times as large as the others.

    The pair contains ``channel`` of head 1 in layer 2.
    """
    generator = torch.Generator().manual_seed(0)
    found = [tuple(torch.randn(1, HEADS, tokens, DIM, generator=generator) for _ in "kv") for _ in range(LAYERS)]
    found[2][0][:, 1, :, [channel, channel + DIM // 2]] *= factor
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", ["octopus-4", "kv=scalar:b=4", "k=group:b=4,g=32,rotation=hadamard;v=raw"])
def test_a_very_large_channel_is_named(recipe: str) -> None:
    message = (
        r"layers\[2\].k: channel (5|37) of head 1 is \d{3} times as large as the median channel, as in the keys of 1 of 3 layers"
        r"\. .* add channel_scale=fp16 to the keys' codec"
    )
    with pytest.warns(kvpack.KvpackWarning, match=message) as found:
        kvpack.pack(pairs(300.0), recipe)
    assert len(found) == 1
    assert found[0].filename == __file__


@pytest.mark.parametrize("recipe", ["octopus-3-scaled", "k=scalar:b=4,channel_scale=fp16;v=scalar:b=4", "kivi-4", "raw", "fp8"])
def test_recipes_that_handle_large_channels_do_not_warn(recipe: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvpack.pack(pairs(300.0), recipe)


def test_the_suggested_remedy_works() -> None:
    given = pairs(300.0)
    with pytest.warns(kvpack.KvpackWarning, match="channel_scale=fp16"):
        plain = kvpack.pack(given, "kv=scalar:b=4")
    scaled = kvpack.pack(given, "kv=scalar:b=4,channel_scale=fp16")
    others = torch.arange(DIM) % (DIM // 2) != 5
    k = given[2][0]
    errors = [(cache[2].unpack(torch.float32)[0][:, 1] - k[:, 1])[..., others].norm() for cache in (plain, scaled)]  # type: ignore[index]
    assert errors[1] < errors[0] / 10


def test_ordinary_values_do_not_warn() -> None:
    """Channels of 20 times the median, single tokens, and heads that are mostly zero cause no warning."""
    given = pairs(20.0)
    given[0][0][:, 0, 7, 3] = 1e4
    given[1][0][:, 0, :, 4:] = 0
    assert MAX_CHANNEL_RATIO > 32
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvpack.pack(given, "kv=scalar:b=4;raw=4,0.6,4")
        kvpack.pack([(k[:, :, :0], v[:, :, :0]) for k, v in given], "kv=scalar:b=4")


@pytest.mark.parametrize(
    ("factor", "large", "ordinary", "is_named"),
    [(64.0, 8, 8, False), (65.0, 8, 8, True), (65.0, 5, 8, True), (65.0, 4, 8, False), (65.0, 8, 5, True), (65.0, 8, 4, False)],
)
def test_medians_of_channels_are_compared(factor: float, large: int, ordinary: int, is_named: bool) -> None:
    """Of 8 tokens, ``large`` have ``factor`` in one channel, and the rest 1. ``ordinary`` have 1 in other channels, and the rest 0."""
    k = (torch.arange(8) < ordinary).float()[None, None, :, None].expand(1, 1, 8, DIM).clone()
    k[..., 5] = torch.where(torch.arange(8) < large, factor, 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kvpack.pack([(k, torch.ones(1, 1, 8, DIM))], "kv=scalar:b=4")
    assert any("channel 5 of head 0" in str(warning.message) for warning in caught) == is_named
