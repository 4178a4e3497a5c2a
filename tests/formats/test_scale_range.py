"""Tests of 8-bit scales: their decoded values, their cost, and the range that runs share if they are appended one by one."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import kvpack
from kvpack.formats import scale_range
from kvpack.formats.errors import InvalidParameter, InvalidPayload, ValueTooLarge
from kvpack.formats.group import AXES, Group
from kvpack.formats.runs import Run
from kvpack.formats.streams import DTYPE_BYTES, Layout
from support.caches import random_pairs
from support.strategies import check_round_trip, contents, create


def group(dim: int = 64, **words: Any) -> Group:
    codec = create("group", dim, words.pop("side", "k"), **{name: str(value) for name, value in ({"b": 2, "scales": "u8"} | words).items()})
    assert isinstance(codec, Group)
    return codec


def error(codec: Group, x: torch.Tensor) -> torch.Tensor:
    """Return the squared errors of the decoded values, ``[batch, kv_head, token, dim]``."""
    return (codec.decode(codec.encode(x)) - x).square()


@pytest.mark.parametrize("axis", AXES)
def test_the_layout_and_the_bits_match_the_specification(axis: str) -> None:
    layout = group(80, axis=axis, token_scale="fp16").layout(2, 3, 33)
    rows = (2, 80) if axis == "token" else (33, 3)
    assert list(layout) == ["codes.0", "scales", "scale_range", "token_scale"]
    assert layout["scales"] == Layout("U8", (2, 3, *rows, 2), 32 if axis == "token" else 1)
    assert layout["scale_range"] == Layout("F16", (2, 3, 1, 4), per="run")
    whole = group(128, axis=axis).layout(1, 8, 4096)
    stored = sum(DTYPE_BYTES[entry.dtype] * int(numpy.prod(entry.shape)) for entry in whole.values())
    assert 8 * stored / (8 * 4096 * 128) == 2.5 + 8 * 8 / (4096 * 128)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("bits", range(1, 9), ids=lambda bits: f"{bits} bits")
def test_decoding_is_exact_for_any_valid_streams(bits: int, axis: str) -> None:
    codec = group(80, b=bits, axis=axis)
    random = numpy.random.default_rng(bits)
    codes = random.integers(0, 2**bits, (2, 3, 45, 80))
    members = random.integers(0, 256, (2, 3, *((2, 80) if axis == "token" else (45, 3)), 2)).astype(numpy.uint8)
    # Steps and minima of either sign, subnormal ones among them; the largest root is 0.4 * 255 + 100.
    ranges = random.uniform(-1, 1, (2, 3, 1, 4)) * 2.0 ** random.integers(-20, 0, (2, 3, 1, 4)) * [0.4, 100, 0.4, 100]
    ranges = ranges.astype(numpy.float16)
    streams = codec.pack("codes", torch.from_numpy(codes))
    streams |= {"scales": torch.from_numpy(members), "scale_range": torch.from_numpy(ranges)}
    codec.check({name: stream.numpy() for name, stream in streams.items()}, "x")
    step, minimum = (ranges[..., None, first::2].astype(numpy.float64) for first in (0, 1))
    # Exact in binary64, then rounded as the text says.
    root = (minimum + step * members).astype(numpy.float32)
    pairs = (root.astype(numpy.float64) * numpy.abs(root)).astype(numpy.float32).astype(numpy.float16).astype(numpy.float64)
    spread = numpy.repeat(pairs, 32, 2 if axis == "token" else 3)[:, :, :45, :80]
    expected = ((codes - (2**bits - 1) / 2) * spread[..., 0] + spread[..., 1]).astype(numpy.float32)
    assert numpy.array_equal(codec.decode_frame(streams).numpy(), expected)


def test_a_codec_with_pairs_decodes_identically() -> None:
    codec = group(80, token_scale="fp16", rotation="hadamard")
    streams = codec.encode(contents("gaussian", (1, 2, 45, 80), seed=1))
    plain, pairs = codec.with_fp16_scales(streams)
    assert plain == create("group", 80, "k", b="2", token_scale="fp16", rotation="hadamard")
    assert {name: (str(stream.dtype), tuple(stream.shape)) for name, stream in pairs.items() if name == "scales"} == {
        "scales": ("torch.float16", plain.layout(1, 2, 45)["scales"].shape)
    }
    assert torch.equal(plain.decode_frame(pairs), codec.decode_frame(streams))


@pytest.mark.parametrize("words", [{}, {"side": "v"}, {"rotation": "hadamard", "token_scale": "fp16"}, {"b": 4}], ids=str)
def test_eight_bit_scales_increase_the_error_by_less_than_two_percent(words: dict[str, Any]) -> None:
    x = contents("gaussian", (1, 4, 512, 128), seed=2)
    ratio = error(group(128, **words), x).mean() / error(group(128, **words, scales="fp16"), x).mean()
    assert 0.99 < ratio < 1.01


def test_channels_next_to_outlier_channels_keep_their_precision() -> None:
    x = contents("gaussian", (1, 4, 512, 128), seed=3)
    x[..., [3, 67]] *= 30
    x[..., 10] += 40
    ordinary = [channel for channel in range(128) if channel not in (3, 10, 67)]
    ratio = error(group(128), x)[..., ordinary].mean() / error(group(128, scales="fp16"), x)[..., ordinary].mean()
    assert ratio < 1.04


@pytest.mark.parametrize("axis", AXES)
def test_much_smaller_groups_have_errors_relative_to_the_largest(axis: str) -> None:
    x = contents("gaussian", (1, 2, 320, 64), seed=4)
    sizes = torch.exp2(torch.randint(-20, 10, (320,), generator=torch.Generator().manual_seed(4)).float())
    x = x * (sizes[:, None] if axis == "channel" else sizes[:64])
    plain, codec = group(axis=axis, scales="fp16"), group(axis=axis)
    assert check_round_trip(codec, x)
    largest = plain.encode(x)["scales"][..., 0].amax().item()
    excess = (codec.decode(codec.encode(x)) - x).abs() - (plain.decode(plain.encode(x)) - x).abs()
    assert excess.max().item() < 1.5 * largest / 100
    lost = codec.with_fp16_scales(codec.encode(x))[1]["scales"][..., 0] == 0
    assert (plain.encode(x)["scales"][..., 0][lost].abs() < largest * 2.0**-16).all()


def test_zeros_next_to_other_groups_stay_near_zero() -> None:
    codec = group(side="v")
    assert not codec.decode(codec.encode(torch.zeros(1, 2, 33, 64))).any()
    x = contents("gaussian", (1, 2, 40, 64), seed=5)
    x[:, :, 7] = 0
    largest = codec.with_fp16_scales(codec.encode(x))[1]["scales"][..., 1].abs().max().item()
    assert codec.decode(codec.encode(x))[:, :, 7].abs().max().item() < largest * 2.0**-14


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (65100.0, r"center of a group at \[0, 0, 0, 5\] is 65100, but the largest that fits in 8 bits is 65025: scale the input"),
        (None, r"scale of a group at \[0, 0, 0, 5\] is 80000, but the largest that fits in 8 bits is 65025"),
    ],
    ids=["centre", "scale"],
)
def test_a_value_that_is_too_large_is_refused(value: float | None, message: str) -> None:
    x = torch.zeros(1, 1, 16, 40)
    x[..., 5] = 40000.0 * torch.tensor([1.0, -1.0] * 8) if value is None else value
    with pytest.raises(ValueTooLarge, match=message):
        group(40, b=1).encode(x)


def test_the_largest_values_are_encoded() -> None:
    x = torch.zeros(1, 1, 32, 4)
    x[..., 0], x[..., 1], x[..., 2] = 65025.0, -65025.0, 32512.0 * torch.tensor([1.0, -1.0] * 16)
    codec = group(4, b=1)
    streams = codec.encode(x)
    codec.check({name: stream.numpy() for name, stream in streams.items()}, "x")
    assert torch.isfinite(codec.decode(streams)).all()
    assert (codec.decode(streams) - x).abs().max() < 1000


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((0, 1, 0, 2), numpy.inf, r"^x\.scale_range: the value at \[0, 1, 0, 2\] is inf"),
        ((0, 1, 0, 1), 256.0, r"^x\.scale_range: code 0 of the range at \[0, 1, 0, 0\] has the root 256"),
        ((0, 0, 0, 2), -1.5, r"^x\.scale_range: code 255 of the range at \[0, 0, 0, 1\] has the root -38"),
    ],
    ids=["infinite", "minimum", "step"],
)
def test_ranges_that_no_writer_produces_are_refused(place: tuple[int, ...], value: float, message: str) -> None:
    codec = group(side="v")
    arrays = {name: stream.numpy().copy() for name, stream in codec.encode(contents("gaussian", (1, 2, 3, 64), seed=6)).items()}
    codec.check(arrays, "x")
    arrays["scale_range"][place] = value
    with pytest.raises(InvalidPayload, match=message):
        codec.check(arrays, "x")


def test_the_parameter_is_stored_only_if_it_is_not_the_default() -> None:
    assert "scale_dtype" not in group(scales="fp16").params()
    params = group().params()
    assert list(params)[-1] == "scale_dtype"
    assert Group.from_params({name: value for name, value in params.items() if name != "id"}) == group()
    refused = [
        ("fp16", "scale_dtype is 'fp16', which is the default and must be omitted"),
        ("f8", "expected one of fp16, u8"),
        (8, "of type int, expected str"),
    ]
    for value, message in refused:
        with pytest.raises(InvalidParameter, match=message):
            Group.from_params({name: entry for name, entry in (params | {"scale_dtype": value}).items() if name != "id"})
    with pytest.raises(InvalidParameter, match="unknown parameters extra"):
        Group.from_params({name: entry for name, entry in (params | {"extra": 1}).items() if name != "id"})
    assert not group().has_same_codes(group(scales="fp16"))


def range_after(codec: Group, x: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    batch, heads, tokens, dim = x.shape
    run = Run((batch, heads, tokens, dim), x.device, lambda: iter(x.split(64, 2)))
    return codec.begin(run, None if before is None else {"scale_range": before}).streams["scale_range"]


def test_a_range_is_kept_while_new_values_fit_and_otherwise_widened() -> None:
    codec = group(side="v")
    x = contents("gaussian", (1, 2, 256, 64), seed=7)
    first = range_after(codec, x, None)
    assert torch.equal(range_after(codec, x[:, :, :100] / 2, first), first)
    assert not first[..., 1].any()
    other = range_after(codec, 3 * x, first)
    step, minimum = (ends[..., 0::2].float() for ends in (first, first[..., 1:]))
    wider, lower = (ends[..., 0::2].float() for ends in (other, other[..., 1:]))
    assert (lower <= minimum).all()
    assert (lower + 255 * wider >= minimum + 255 * step).all()
    assert not torch.equal(other, first)
    empty = range_after(codec, x[:, :, :0], None)
    assert empty.shape == (1, 2, 1, 4)
    assert not empty.any()


def test_a_range_covers_all_blocks_of_a_run() -> None:
    codec = group(side="v")
    x = contents("gaussian", (1, 2, 256, 64), seed=8)
    x[:, :, 200] *= 50
    whole = range_after(codec, x, None)
    assert torch.equal(codec.encode(x)["scale_range"], whole)
    assert not torch.equal(codec.encode(x[:, :, :128])["scale_range"], whole)


def test_appending_token_by_token_needs_few_runs() -> None:
    (k, v), tokens = random_pairs(1, 300, seed=9)[0], 300
    cache = kvpack.pack([(k[:, :, :1], v[:, :, :1])], "kv=group:b=2,g=32,scales=u8")
    for token in range(1, tokens):
        cache = cache.append([(k[:, :, token : token + 1], v[:, :, token : token + 1])])
    whole = kvpack.pack([(k, v)], "kv=group:b=2,g=32,scales=u8")
    for x, side, at_once in ((k, cache[0].k, whole[0].k), (v, cache[0].v, whole[0].v)):
        assert side is not None
        assert at_once is not None
        assert side.tokens == tokens
        assert len(side.merged_runs()) <= 6
        errors = [(packed.unpack(torch.float32) - x.float()).square().mean().item() for packed in (side, at_once)]
        assert errors[0] < 1.05 * errors[1]


def test_the_largest_code_decodes_to_a_finite_binary16_number() -> None:
    widest = torch.tensor([[[[255 / 255, 0.0, 510 / 255, -255.0]]]], dtype=torch.float16)
    scale_range.check({"scale_range": widest.numpy()}, "x")
    pair = scale_range.decode_pairs(torch.full((1, 1, 1, 1, 2), 255, dtype=torch.uint8), widest)
    assert pair.flatten().tolist() == [65024.0, 65024.0]


def test_values_below_the_smallest_binary16_number_are_rounded_to_it() -> None:
    x = contents("gaussian", (1, 2, 1, 20), 3) * torch.tensor([2.0**-24, 30.0])[:, None, None]
    check_round_trip(group(20, b=1, g=4, axis="token"), x)


def test_small_tokens_keep_their_signs_in_a_group_with_a_large_token() -> None:
    exponents = torch.full((128, 1), -20.0)
    exponents[::4] = 9
    x = contents("gaussian", (1, 2, 128, 112), 1) * torch.exp2(exponents)
    check_round_trip(create("group", 112, "k", b="1", g="4", scales="u8", norm_rule="norm", qjl="fp16", qjl_seed="1"), x)
