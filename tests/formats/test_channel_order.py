"""Tests of channel_order and block_rotation: the chosen order, the errors that it avoids, and refusals (spec/side-cars.md)."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import kvpack
from kvpack.formats import codec_from_params, create_codec
from kvpack.formats.base import Codec
from kvpack.formats.block_rotation import BlockRotation
from kvpack.formats.channel_order import ChannelOrder
from kvpack.formats.errors import InvalidParameter, InvalidPayload
from kvpack.formats.options import Options
from kvpack.formats.rotation import hadamard
from kvpack.formats.runs import Run
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.streams import Layout

WORDS = {"b": "2", "axis": "channel", "block_rotation": "32", "channel_order": "u8"}


def codec(dim: int = 128, codec_id: str = "group", **words: str) -> Codec:
    return create_codec(codec_id, dim, "k", Options(codec_id, words))


def keys(tokens: int = 96, dim: int = 128, *, seed: int = 0, batch: int = 2, heads: int = 3) -> torch.Tensor:
    return torch.randn(batch, heads, tokens, dim, generator=torch.Generator().manual_seed(seed))


def test_channels_are_dealt_to_blocks_in_alternating_order_of_size() -> None:
    x = torch.ones(1, 2, 5, 8)
    x[0, 0] *= torch.tensor([1, 8, 2, 7, 3, 6, 4, 5.0])
    run = Run((1, 2, 5, 8), x.device, lambda: iter(x.split(2, 2)))
    order = ChannelOrder(8, "u8", size=2).measure(run)["channel_order"]
    # By size: 1 3 5 7 | 6 4 2 0 backwards; equal sizes keep their order.
    assert order[0, 0, 0].tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
    assert order[0, 1, 0].tolist() == [0, 7, 1, 6, 2, 5, 3, 4]
    blocks = ChannelOrder(8, "u16", size=4).measure(run)["channel_order"]
    assert blocks.dtype == torch.uint16
    assert blocks[0, 0, 0].tolist() == [1, 7, 6, 0, 3, 5, 4, 2]


def test_every_block_gets_one_outlier_channel() -> None:
    x = keys()
    outliers = [3, 4, 5, 67]
    x[..., outliers] *= 30
    order = codec(**WORDS).encode(x)["channel_order"].long()
    assert torch.equal(order.sort(-1).values, torch.arange(128).expand(order.shape))
    for row in order.flatten(0, 2).unflatten(-1, (4, 32)):
        assert [sum(channel in outliers for channel in block.tolist()) for block in row] == [1, 1, 1, 1]


@pytest.mark.parametrize(("dim", "size"), [(128, 32), (96, 24), (80, 20), (64, 64), (12, 2)])
def test_a_block_rotation_has_a_hadamard_matrix_per_block(dim: int, size: int) -> None:
    rotation, x = BlockRotation(dim, size), keys(5, dim)
    matrix = torch.tensor(hadamard(size), dtype=torch.float64) / size**0.5
    expected = (x.double().unflatten(-1, (dim // size, size)) @ matrix.T).flatten(-2)
    torch.testing.assert_close(rotation.forward(x, {}).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotation.inverse(rotation.forward(x, {}), {}), x, rtol=0, atol=1e-5)


def test_the_order_is_inverted_correctly() -> None:
    one = codec(b="8", axis="channel", block_rotation="32", channel_order="u8")
    x = keys() * torch.linspace(0.1, 10, 128)
    decoded = one.decode(one.encode(x))
    assert ((decoded - x).norm() / x.norm()).item() < 0.01
    assert isinstance(one, CodecWithSidecars)
    streams, q = one.encode(x), keys(4, seed=1)
    scores = one.query(q, streams) @ one.decode_frame(streams).transpose(-1, -2)
    torch.testing.assert_close(scores, q @ decoded.transpose(-1, -2), rtol=0, atol=1e-4 * scores.abs().max().item())


def test_the_order_protects_channel_groups_from_outlier_channels() -> None:
    x = keys(256)
    outliers = [3, 4, 67, 68]
    x[..., outliers] *= 30
    ordinary = [channel for channel in range(128) if channel not in outliers]
    errors = {}
    for name, words in (
        ("rotation", {"rotation": "hadamard"}),
        ("blocks", {"block_rotation": "32"}),
        ("order", {"block_rotation": "32", "channel_order": "u8"}),
    ):
        one = codec(b="2", axis="channel", **words)
        errors[name] = (one.decode(one.encode(x)) - x)[..., ordinary].square().mean().item()
    assert errors["order"] < errors["blocks"] / 1.5
    assert errors["order"] < errors["rotation"] / 1.5


def test_the_layout_matches_the_specification() -> None:
    assert codec(**WORDS).layout(2, 3, 9)["channel_order"] == Layout("U8", (2, 3, 1, 128), per="run")
    wide = codec(512, **(WORDS | {"channel_order": "u16"}))
    assert wide.layout(1, 2, 0)["channel_order"] == Layout("U16", (1, 2, 1, 512), per="run")
    x = keys(8, 512, batch=1, heads=1)
    assert ((wide.decode(wide.encode(x)) - x).norm() / x.norm()).item() < 0.5
    assert list(codec(**WORDS).params())[-2:] == ["channel_order", "block_rotation"]
    for words in (WORDS, {**WORDS, "channel_scale": "fp16", "sinks": "2", "qjl": "fp16"}):
        assert codec_from_params(codec(**words).params()) == codec(**words)


def test_zero_tokens_can_be_encoded() -> None:
    one = codec(**WORDS, sinks="4", raw_tokens="fp32")
    streams = one.encode(keys(0))
    assert one.decode(streams).shape == one.decode_frame(streams).shape == (2, 3, 0, 128)
    one.check({name: stream.numpy() for name, stream in streams.items()}, "k")


def test_appended_tokens_use_the_order_of_their_side() -> None:
    x = keys(130)
    cache = kvpack.pack([(x[:, :, :100], None)], "k=group:b=2,axis=channel,block_rotation=32,channel_order=u8;v=raw")
    for token in range(100, 130):
        cache = cache.append([(x[:, :, token : token + 1], None)])
    assert cache[0].k.merged_runs() == (130,)
    other = cache.convert("k=group:b=2,axis=channel,block_rotation=32;v=raw")
    assert "channel_order" not in other[0].k.runs[0].streams


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("block_rotation=24", "block_rotation is 24, expected a divisor of the head dim 128"),
        ("block_rotation=1", "from 2 to 1024"),
        ("channel_order=u8", "channel_order=u8 has no effect without block_rotation=<size>"),
        ("block_rotation=32,channel_order=u32", "expected one of u8, u16"),
    ],
)
def test_invalid_recipes_are_refused(words: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        kvpack.pack([(keys(4), keys(4))], f"kv=group:b=2,{words}")


@pytest.mark.parametrize(
    ("dim", "sidecars", "message"),
    [
        (64, {"block_rotation": True}, "expected an integer"),
        (64, {"block_rotation": "32"}, "expected an integer"),
        (64, {"block_rotation": 1}, "expected a divisor"),
        (64, {"block_rotation": 48}, "divisor of the head dim 64 that is at least 2"),
        (72, {"block_rotation": 36}, "no Hadamard rotation"),
        (64, {"channel_order": "u32"}, "expected one of u8, u16"),
        (300, {"channel_order": "u8"}, "at most 256 channels, but the head dim is 300"),
    ],
)
def test_invalid_header_maps_are_refused(dim: int, sidecars: dict[str, Any], message: str) -> None:
    params = codec(dim, b="2").params()
    with pytest.raises(InvalidParameter, match=message):
        codec_from_params({**params, **sidecars})


@pytest.mark.parametrize("value", [0, 64, 255], ids=["twice", "beyond", "largest"])
def test_invalid_permutations_are_refused(value: int) -> None:
    one = codec(64, **WORDS)
    arrays = {name: stream.numpy().copy() for name, stream in one.encode(keys(5, 64)).items()}
    one.check(arrays, "0.k")
    place = tuple(int(i) for i in numpy.argwhere(arrays["channel_order"] == 7)[-1])
    arrays["channel_order"][place] = value
    message = rf"0\.k\.channel_order: the row at \[{place[0]}, {place[1]}, 0\] must list each of the 64 channels exactly once"
    with pytest.raises(InvalidPayload, match=message):
        one.check(arrays, "0.k")
