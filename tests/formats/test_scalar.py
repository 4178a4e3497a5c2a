"""Tests of the scalar codec: tables against their density, accuracy, both alphabets, layout, and edge cases."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.coding.recipes import Recipe
from kvpack.formats.errors import InvalidParameter, InvalidPayload, ValueTooLarge
from kvpack.formats.lloyd_max import coordinate_table
from kvpack.formats.options import Options
from kvpack.formats.scalar import SCALES, Scalar
from kvpack.formats.streams import DTYPE_BYTES
from support.strategies import CONTENTS, check_round_trip, contents, create

SPEC = Path(__file__).parents[2] / "spec" / "codecs" / "scalar.md"
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
EVERY_BITS = range(1, 9)
WIDTHS = [{"b": 1}, {"b": 3}, {"b": 8}, {"b": 2, "high": 3}, {"b": 1, "high": 6, "share": 1}]


def scalar(dim: int = 128, **words: object) -> Scalar:
    return Scalar.create(dim, "k", Options("scalar", {name: str(value) for name, value in words.items()}))


def with_high_channels(codec: Scalar, channels: set[int]) -> Scalar:
    """Return the same codec with equally many, but different, high channels."""
    return replace(codec, high_channels=sum(1 << channel for channel in channels).to_bytes(-(-codec.dim // 8), "little"))


def arrays(streams: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: stream.numpy().copy() for name, stream in streams.items()}


def keys(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def magnitudes(table: bytes) -> np.ndarray:
    return np.frombuffer(table, "<f4").astype(np.float64)


# Tables


@pytest.mark.parametrize("dim", [3, 64, 80, 128, 1024])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_magnitudes_are_the_means_of_their_cells(bits: int, dim: int) -> None:
    """Lloyd's condition is checked with the density of OCTOPUS, Eq. 3, as printed in the paper."""
    table = magnitudes(coordinate_table(dim, 2 ** (bits - 1)))
    points = (np.arange(1 << 20) + 0.5) / (1 << 20)
    density = (1 - points**2) ** ((dim - 3) / 2)
    nearest = np.searchsorted((table[1:] + table[:-1]) / 2, points)
    means = np.bincount(nearest, density * points, len(table)) / np.bincount(nearest, density, len(table))
    assert (np.diff(table) > 0).all()
    np.testing.assert_allclose(table, means, atol=3e-6)


@pytest.mark.parametrize(("dim", "mean"), [(2, 2 / math.pi), (3, 0.5), (4, 4 / (3 * math.pi)), (5, 3 / 8)])
def test_a_single_magnitude_is_the_overall_mean(dim: int, mean: float) -> None:
    """The dims include 2, for which the density has a pole."""
    assert magnitudes(coordinate_table(dim, 1)) == pytest.approx([mean], abs=1e-6)


def test_magnitudes_of_three_bits_are_unchanged() -> None:
    """A change of these numbers would change the bytes that every writer stores by default.

    They are close to Max's levels for a normal density.
    """
    found = magnitudes(coordinate_table(128, 4))
    np.testing.assert_allclose(found, [0.02160431, 0.06658561, 0.11813977, 0.18839718], atol=2e-7)
    np.testing.assert_allclose(found * math.sqrt(128), [0.2451, 0.7560, 1.344, 2.152], rtol=0.012)


# Accuracy


@pytest.mark.parametrize(
    ("words", "error", "cosine"),
    [
        ({"b": 2}, 0.1161, 0.9406),
        ({"b": 3}, 0.0340, 0.9831),
        ({"b": 4}, 0.0094, 0.9954),
        ({"b": 4, "rotation": "none"}, 0.0094, 0.9954),
        ({"b": 2, "high": 3}, (0.1161 + 0.0340) / 2, 0.9621),
        ({"b": 2, "high": 4, "share": 32}, (3 * 0.1161 + 0.0094) / 4, 0.9549),
    ],
    ids=str,
)
def test_accuracy_equals_the_papers(words: dict[str, object], error: float, cosine: float) -> None:
    """Expected values are from OCTOPUS, Table 1, for Gaussian keys with d = 128. For two widths, the error is the mean of both."""
    codec, x = scalar(**words, norm_rule="norm"), keys(1, 2, 2048, 128)
    decoded = codec.decode(codec.encode(x))
    assert (decoded - x).square().mean().item() == pytest.approx(error, rel=0.02)
    assert torch.cosine_similarity(decoded, x, dim=-1).mean().item() == pytest.approx(cosine, abs=1e-3)


@pytest.mark.parametrize("bits", [5, 6, 7, 8])
def test_every_additional_bit_quarters_the_error(bits: int) -> None:
    x = keys(1, 1, 512, 128)
    errors = [(codec.decode(codec.encode(x)) - x).square().mean().item() for codec in (scalar(b=bits - 1), scalar(b=bits))]
    assert 3.5 < errors[0] / errors[1] < 4.1


def test_accuracy_does_not_depend_on_key_norms() -> None:
    codec, x = scalar(b=3, norm="fp32"), keys(1, 1, 64, 128)
    for factor in (2.0**-110, 2.0**-20, 2.0**20, 2.0**110):
        decoded = codec.decode(codec.encode(x * factor)) / factor
        assert (decoded - x).square().mean().item() == pytest.approx(0.0340, rel=0.05)


@pytest.mark.parametrize(("bits", "most"), [(2, 0.99), (3, 0.93), (4, 0.85), (5, 0.82)])
def test_scaled_rounding_has_a_smaller_error(bits: int, most: float) -> None:
    x = keys(1, 1, 2048, 64)
    scaled, nearest = (scalar(64, b=bits, rounding=rounding) for rounding in ("scaled", "nearest"))
    errors = [(codec.decode(codec.encode(x)) - x).square().mean().item() for codec in (scaled, nearest)]
    assert errors[0] < most * errors[1]


@pytest.mark.parametrize("words", ["b=2,norm_rule=norm,rounding=scaled", "b=2,qjl=fp16,rounding=scaled"])
def test_scaled_rounding_needs_the_unbiased_factor(words: str) -> None:
    with pytest.raises(InvalidParameter, match=r"rounding=scaled needs norm_rule=unbiased, but norm_rule is .*, or omit rounding="):
        Recipe(f"k=scalar:{words};v=raw").codec(0, 1, "k", 64)
    mended = words.replace("norm_rule=norm,", "") + ("" if "norm_rule" in words else ",norm_rule=unbiased")
    for recipe in (mended, words.replace(",rounding=scaled", "")):
        assert Recipe(f"k=scalar:{recipe};v=raw").codec(0, 1, "k", 64).nominal_bits >= 2


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_scaled_rounding_selects_the_nearest_direction(bits: int) -> None:
    """The stored codes have the largest cosine among the codes of all multiples of a token. Zeros stay zeros."""
    codec = scalar(16, b=bits, rotation="none", norm="fp32", rounding="scaled")
    x = keys(1, 1, 500, 16)
    x[0, 0, 7] = 0
    decoded = codec.decode(codec.encode(x))[0, 0].double()
    assert torch.equal(decoded[7], torch.zeros(16, dtype=torch.float64))
    unit = torch.nn.functional.normalize(x[0, 0].double(), dim=-1)
    table = torch.frombuffer(bytearray(codec.magnitude_table), dtype=torch.float32).double()
    cosines = []
    for scale in SCALES:
        level = ((scale * unit.abs())[..., None] - table).abs().argmin(-1)
        cosines.append(torch.cosine_similarity(unit, table[level] * unit.sign(), dim=-1))
    found = torch.cosine_similarity(unit, decoded, dim=-1)
    assert (found - torch.stack(cosines).amax(0)).abs().max() < 1e-6


def test_scaled_rounding_decides_near_ties_like_exact_arithmetic() -> None:
    """Rows with permuted channels have different binary32 sums, but must have the same codes."""
    codec, x = scalar(64, b=8, rotation="none", norm="fp32", rounding="scaled"), keys(1, 1, 2000, 64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    same = codec.decode(codec.encode(x))[..., order] / codec.decode(codec.encode(x[..., order]))
    assert ((same - 1).abs().amax(-1) > 1e-5).float().mean() < 2e-3


@pytest.mark.parametrize("bits", EVERY_BITS)
def test_every_code_is_the_nearest(bits: int) -> None:
    """Comparisons and bisection find the same codes, except that exact midpoints may be rounded either way."""
    codec = scalar(16, b=bits, rotation="none", norm="fp32", norm_rule="norm")
    x = torch.cat([keys(1, 1, 300, 16), keys(1, 1, 300, 16, seed=1) * keys(1, 1, 300, 16, seed=2).pow(3)], 2)
    streams = codec.encode(x)
    unit = x.double() / streams["norm"].double()[..., None]
    table = torch.from_numpy(magnitudes(codec.magnitude_table))
    best = (unit.abs()[..., None] - table).abs().amin(-1)
    found = (codec.decode_frame(streams).double() / streams["norm"].double()[..., None] - unit).abs()
    assert (found - best).max() < 1e-6


# Two alphabets


def test_high_channels_are_the_selected_ones() -> None:
    codec = with_high_channels(scalar(16, b=1, high=8, share=3, rotation="none", norm_rule="norm"), {2, 9, 15})
    x = keys(1, 2, 50, 16)
    error = (codec.decode(codec.encode(x)) - x).square().mean((0, 1, 2))
    high = torch.zeros(16, dtype=torch.bool)
    high[[2, 9, 15]] = True
    assert error[high].max() < 1e-3
    assert error[~high].min() > 0.1


def test_each_width_encodes_its_channels_independently() -> None:
    both = with_high_channels(scalar(24, b=2, high=5, share=4, rotation="hadamard", norm_rule="norm"), {0, 7, 8, 23})
    low, high = (scalar(24, b=bits, rotation="hadamard", norm_rule="norm") for bits in (2, 5))
    x = keys(2, 1, 9, 24)
    frames = [codec.decode_frame(codec.encode(x)) for codec in (both, low, high)]
    is_high = torch.zeros(24, dtype=torch.bool)
    is_high[[0, 7, 8, 23]] = True
    assert torch.equal(frames[0], torch.where(is_high, frames[2], frames[1]))


def test_half_of_the_channels_are_high_by_default() -> None:
    assert scalar(128, b=2, high=3).high_channels == b"\xff" * 8 + b"\0" * 8
    assert scalar(5, b=2, high=3, rotation="none").high_channels == b"\x03"
    assert scalar(96, b=2, high=3, share=32) == scalar(96, b=2, high=3, share=32, seed=0)
    assert scalar(96, b=2, high=3, share=32).nominal_bits == pytest.approx(2 + 1 / 3)


# Layout


@pytest.mark.parametrize(
    ("words", "row_bytes", "bits"),
    [
        ({"b": 1}, {"codes": 16}, 1.125),
        ({"b": 2}, {"codes": 32}, 2.125),
        ({"b": 3}, {"codes": 48}, 3.125),
        ({"b": 4}, {"codes": 64}, 4.125),
        ({"b": 8}, {"codes": 128}, 8.125),
        ({"b": 3, "norm": "fp32"}, {"codes": 48}, 3.25),
        ({"b": 2, "high": 3, "share": 32}, {"codes": 24, "codes_high": 12}, 2.375),
        ({"b": 2, "high": 3}, {"codes": 16, "codes_high": 24}, 2.625),
    ],
    ids=str,
)
def test_stored_bits_for_head_dim_128_are_unchanged(words: dict[str, object], row_bytes: dict[str, int], bits: float) -> None:
    codec = scalar(**words)
    streams = codec.encode(keys(1, 1, 4, 128))
    assert {name: packing.row_bytes for name, packing in codec.packings().items()} == row_bytes
    assert sum(stream.nbytes for stream in streams.values()) * 8 / (4 * 128) == bits
    assert codec.nominal_bits == bits - (32 if words.get("norm") == "fp32" else 16) / 128


def test_the_table_in_the_specification_is_stored() -> None:
    rows = re.findall(r"^\| (\d) \| (?:none|(\d+) of (\d) bits) \| (\d+) \| ([\d.]+) \|$", SPEC.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 4
    for bits, share, high, expected, bits_a_value in rows:
        layout = scalar(b=bits, **({"high": high, "share": share} if high else {})).layout(1, 1, 1)
        found = sum(DTYPE_BYTES[entry.dtype] * math.prod(entry.shape) for entry in layout.values())
        assert found == int(expected)
        assert found * 8 / 128 == float(bits_a_value)


@pytest.mark.parametrize("words", WIDTHS, ids=str)
@pytest.mark.parametrize("norm", ["fp16", "fp32"])
def test_streams_have_the_declared_layout(words: dict[str, object], norm: str) -> None:
    codec = scalar(80, norm=norm, **words)
    streams = codec.encode(keys(2, 3, 5, 80))
    layout = codec.layout(2, 3, 5)
    names = {torch.uint16: "U16", torch.float16: "F16", torch.float32: "F32"}
    assert {name: (names[stream.dtype], tuple(stream.shape)) for name, stream in streams.items()} == {
        name: (declared.dtype, declared.shape) for name, declared in layout.items()
    }
    assert list(streams) == list(layout)
    codec.check(arrays(streams), "0.k")


def test_codes_are_repacked_losslessly() -> None:
    codec = scalar(64, b=2, high=3)
    other = replace(codec, fields=(("codes", 4), ("codes_high", 5)))
    streams = codec.encode(keys(1, 2, 9, 64))
    assert codec.has_same_codes(other)
    assert not codec.has_same_codes(with_high_channels(codec, set(range(32, 64))))
    moved = codec.repack(streams, other)
    other.check(arrays(moved), "0.k")
    assert torch.equal(other.decode(moved), codec.decode(streams))
    back = other.repack(moved, codec)
    assert all(torch.equal(back[name], streams[name]) for name in streams)


# Inputs


@pytest.mark.parametrize("words", WIDTHS, ids=str)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_dim_is_supported(dim: int, words: dict[str, object]) -> None:
    for kind, tokens in (("outliers", 37), ("gaussian", 1), ("gaussian", 0)):
        text = {name: str(value) for name, value in words.items()}
        assert check_round_trip(create("scalar", dim, seed="3", **text), contents(kind, (1, 2, tokens, dim), seed=dim))


@pytest.mark.parametrize("dim", [2, 3, 5, 7, 100, 1023])
def test_head_dims_without_a_rotation_are_encoded_without_one(dim: int) -> None:
    codec, x = scalar(dim, b=6, rotation="none"), keys(1, 1, 20, dim)
    assert (codec.decode(codec.encode(x)) - x).square().mean() < 0.002


@pytest.mark.parametrize("norm", ["fp16", "fp32"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_all_kinds_of_values_are_decoded_within_the_bound(kind: str, norm: str) -> None:
    for rotation, words in itertools.product(("none", "signed-hadamard"), ({"b": "2"}, {"b": "6"}, {"b": "1", "high": "2"})):
        accepted = check_round_trip(create("scalar", 40, norm=norm, rotation=rotation, **words), contents(kind, (2, 3, 7, 40), seed=1))
        assert accepted or kind == "large"


@pytest.mark.parametrize("norm", ["fp16", "fp32"])
def test_zero_tokens_among_others_decode_to_exact_zeros(norm: str) -> None:
    codec, x = scalar(b=2, high=3, norm=norm), keys(1, 2, 6, 128)
    x[0, 1, 3] = 0
    decoded = codec.decode(codec.encode(x))
    assert torch.equal(decoded[0, 1, 3], torch.zeros(128))
    alone = codec.decode(codec.encode(keys(1, 2, 6, 128)))
    kept = torch.ones(1, 2, 6, dtype=torch.bool)
    kept[0, 1, 3] = False
    torch.testing.assert_close(decoded[kept], alone[kept])


@pytest.mark.parametrize("value", [1e-45, 1e-39, 1e-30, 3e-5, 1.0, 5e3, 1e20, 2.9e37], ids=str)
@pytest.mark.parametrize("pattern", ["constant", "one channel", "normal"])
def test_finite_values_of_any_size_are_encoded_with_fp32_norms(value: float, pattern: str) -> None:
    codec = scalar(b=4, norm="fp32")
    patterns = {"constant": torch.ones(2, 128), "one channel": torch.eye(2, 128), "normal": keys(2, 128).clamp(-1, 1)}
    x = patterns[pattern][None, None] * value
    decoded = codec.decode(codec.encode(x))
    assert torch.isfinite(decoded).all()
    # Below the smallest normal number a direction keeps fewer bits.
    assert (decoded.double() - x.double()).norm() <= 0.2 * x.double().norm() + 2.0**-126


def test_errors_give_name_and_position_of_a_norm_beyond_binary16() -> None:
    x = keys(1, 2, 3, 128)
    x[0, 1, 2] *= 1e4
    with pytest.raises(ValueTooLarge, match=r"norm of a token at \[0, 1, 2\] is .*largest float16 value is 65504"):
        scalar(b=3).encode(x)
    assert scalar(b=3, norm="fp32").encode(x)["norm"][0, 1, 2] > 65504
    with pytest.raises(ValueTooLarge, match=r"norm of a token at \[0, 0, 0\] is inf.*float32"):
        scalar(b=3, norm="fp32").encode(torch.full((1, 1, 1, 128), 3e38))


@pytest.mark.parametrize("tokens", [0, 1, 2049])
@pytest.mark.parametrize("words", [{"b": 3}, {"b": 2, "high": 6}], ids=str)
def test_encoding_tokens_together_or_one_by_one_agrees(tokens: int, words: dict[str, object]) -> None:
    codec, x = scalar(64, rotation="none", **words), keys(1, 1, tokens, 64)
    streams = codec.encode(x)
    assert codec.decode(streams).shape == x.shape
    if tokens:
        last = codec.encode(x[:, :, -1:])
        assert all(torch.equal(streams[name][:, :, -1:], last[name]) for name in last)


def test_strided_input_is_encoded_like_contiguous_input() -> None:
    codec, x = scalar(64, b=2, high=3), keys(2, 5, 3, 64).transpose(1, 2)
    streams, expected = codec.encode(x), codec.encode(x.contiguous())
    assert all(torch.equal(streams[name], expected[name]) for name in expected)


@pytest.mark.parametrize("rotation", ["none", "signed-hadamard"])
def test_the_input_is_not_modified(rotation: str) -> None:
    x = keys(1, 1, 9, 128)
    for words in ({"b": 3}, {"b": 2, "high": 3}):
        scalar(rotation=rotation, **words).encode(x)
    assert torch.equal(x, keys(1, 1, 9, 128))


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_values_survive_a_round_trip_within_the_bound(data: st.DataObject) -> None:
    """The test covers any two widths on any channels."""
    dim, bits = data.draw(st.integers(2, 70)), data.draw(st.integers(1, 7))
    norm, high = data.draw(st.sampled_from(["fp16", "fp32"])), data.draw(st.integers(bits + 1, 8))
    channels = data.draw(st.sets(st.integers(0, dim - 1), min_size=1, max_size=dim - 1))
    codec = with_high_channels(scalar(dim, b=bits, high=high, share=len(channels), norm=norm, rotation="none"), channels)
    kind, tokens = data.draw(st.sampled_from(CONTENTS)), data.draw(st.integers(0, 9))
    check_round_trip(codec, contents(kind, (1, 2, tokens, dim), data.draw(st.integers(0, 2**32))))


# Parameters and stored bytes


@pytest.mark.parametrize("words", WIDTHS, ids=str)
def test_parameters_are_restored_from_the_header(words: dict[str, object]) -> None:
    codec = scalar(80, norm="fp32", rotation="hadamard", seed=7, **words)
    params = codec.params()
    assert params.pop("id") == "scalar"
    found = Scalar.from_params(params)
    assert found == codec
    x = keys(1, 1, 3, 80)
    assert torch.equal(found.decode(codec.encode(x)), codec.decode(codec.encode(x)))


@pytest.mark.parametrize("bits", [3, 6])
def test_a_file_may_have_its_own_tables(bits: int) -> None:
    own = np.linspace(0, 0.5, 2 ** (bits - 1)).astype("<f4")
    codec = replace(scalar(64, b=bits, rotation="none"), magnitude_table=own.tobytes())
    x = keys(1, 1, 3, 64)
    unit = codec.decode(codec.encode(x)) / codec.encode(x)["norm"].float()[..., None]
    nearest = own[np.abs(unit.abs().numpy()[..., None] - own).argmin(-1)]
    np.testing.assert_allclose(unit.abs().numpy(), nearest, atol=1e-6)


TWO = {"b": 2, "high": 3, "share": 4}


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        ({"b": 3}, {"dim": 1}, "dim is 1, expected 2 to 1024"),
        ({"b": 3}, {"dim": 1025}, "dim is 1025"),
        ({"b": 3}, {"dim": 100}, "no Hadamard rotation for 100 channels"),
        ({"b": 3}, {"bits": 0}, "bits is 0, expected 1 to 8"),
        ({"b": 3}, {"bits": 9}, "bits is 9, expected 1 to 8"),
        ({"b": 3}, {"norm": "bf16"}, "norm is 'bf16'"),
        ({"b": 3}, {"rotation_kind": "random"}, "rotation_kind is 'random'"),
        ({"b": 3}, {"seed": -1}, "seed is -1"),
        ({"b": 3}, {"magnitude_table": b""}, "magnitude_table has 0 bytes, expected 16 for 4 float32 values"),
        ({"b": 2}, {"magnitude_table": np.array([0.3, 0.3], "<f4").tobytes()}, "the values of magnitude_table must be in"),
        ({"b": 2}, {"magnitude_table": np.array([0.3, 1.5], "<f4").tobytes()}, "the values of magnitude_table must be in"),
        ({"b": 2}, {"magnitude_table": np.array([-0.1, 0.5], "<f4").tobytes()}, "the values of magnitude_table must be in"),
        ({"b": 2}, {"magnitude_table": np.array([0.1, np.nan], "<f4").tobytes()}, "the values of magnitude_table must be in"),
        ({"b": 2}, {"high_magnitude_table": bytes(4)}, "high_magnitude_table has 4 bytes, expected 0 for 0 float32 values"),
        ({"b": 2}, {"high_channels": bytes(8)}, "high_channels has 8 bytes, expected none without bits_high"),
        ({"b": 2}, {"bits_high": 3}, "high_channels has 0 bytes, expected 8: one bit for each of 64 channels"),
        ({"b": 2}, {"fields": (("codes", 8), ("codes_high", 8))}, "fields must name the streams codes, but names codes, codes_high"),
        ({"b": 2}, {"fields": (("codes", 0),)}, "the number of fields is 0"),
        (TWO, {"bits_high": 2}, "bits_high is 2, expected 3 to 8"),
        (TWO, {"bits_high": -1}, "bits_high is -1, expected 3 to 8"),
        (TWO, {"bits_high": 9}, "bits_high is 9, expected 3 to 8"),
        (TWO, {"bits_high": 0}, "expected none without bits_high"),
        (
            TWO,
            {"high_channels": bytes(8)},
            "is 0000000000000000, expected at least one but not all of the first 64 bits set, and no others",
        ),
        (TWO, {"high_channels": b"\xff" * 8}, "expected at least one but not all of the first 64 bits set"),
        (TWO, {"high_channels": b"\x01" + bytes(8)}, "high_channels has 9 bytes"),
        (
            {**TWO, "dim": 12},
            {"high_channels": b"\x01\x10"},
            "is 0110, expected at least one but not all of the first 12 bits set, and no others",
        ),
        (TWO, {"high_magnitude_table": bytes(8)}, "high_magnitude_table has 8 bytes, expected 16 for 4 float32 values"),
        (TWO, {"high_magnitude_table": bytes(16)}, "the values of high_magnitude_table must be in"),
        (TWO, {"fields": (("codes", 8),)}, "fields must name the streams codes, codes_high, but names codes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_parameters_out_of_range_are_refused(words: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    codec = scalar(**{"dim": 64, **words})
    with pytest.raises(InvalidParameter, match=message):
        replace(codec, **changes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "needs b="),
        ({"b": 0}, "expected an integer from 1 to 8"),
        ({"b": 9}, "expected an integer from 1 to 8"),
        ({"b": 3, "high": 3}, "expected an integer from 4 to 8"),
        ({"b": 3, "share": 3}, "share=3 has no effect without high=<bits>"),
        ({"b": 3, "high": 4, "share": 0}, "expected an integer from 1 to"),
        ({"b": 3, "high": 4, "share": 128}, "share is 128, expected 1 to 127"),
        ({"b": 3, "norm": "fp8"}, "expected one of fp16, fp32"),
        ({"b": 3, "dim": 1}, "dim is 1, expected 2 to 1024"),
        ({"b": 3, "bits": 3}, "no option 'bits'"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        scalar(**words)


@pytest.mark.parametrize(
    ("words", "stream", "word", "message"),
    [
        ({"b": 3}, "codes.1", 1 << 15, "spare bits of word"),
        ({"b": 2, "high": 3, "share": 5}, "codes_high.0", 1 << 15, "spare bits of word"),
        ({"b": 2}, "norm", 0x7C00, "the value at .* is inf"),
        ({"b": 2, "norm": "fp32"}, "norm", 0x7FC00000, "the value at .* is nan"),
    ],
    ids=["spare bit", "spare bit of the high codes", "infinity", "NaN"],
)
def test_streams_that_no_writer_may_produce_are_refused(words: dict[str, Any], stream: str, word: int, message: str) -> None:
    codec = scalar(63, rotation="none", **words)
    stored = arrays(codec.encode(keys(1, 2, 3, 63)))
    codec.check(stored, "0.k")
    array = stored[stream]
    array.view(f"u{array.itemsize}")[..., -1] = word
    with pytest.raises(InvalidPayload, match=rf"0\.k\.{stream.split('.')[0]}.*{message}"):
        codec.check(stored, "0.k")


# The spec page


@pytest.mark.parametrize("dim", [80, 128])
@pytest.mark.parametrize("words", WIDTHS, ids=str)
def test_decoding_follows_the_specification_within_its_tolerance(dim: int, words: dict[str, object]) -> None:
    codec = scalar(dim, norm="fp32", **words)
    if codec.bits_high:
        codec = with_high_channels(codec, set(range(1, dim, dim // codec.packings()["codes_high"].symbols)))
    streams = codec.encode(keys(1, 1, 50, dim))
    digits = {stream: codec.unpack(stream, streams)[0][0, 0].tolist() for stream in codec.packings()}
    norms = streams["norm"][0, 0].double().tolist()
    high = [bool(codec.high_channels and codec.high_channels[c // 8] >> c % 8 & 1) for c in range(dim)]
    tables = {False: magnitudes(codec.magnitude_table), True: magnitudes(codec.high_magnitude_table)}
    frame = np.zeros((50, dim))
    for t, c in itertools.product(range(50), range(dim)):
        code = digits["codes_high" if high[c] else "codes"][t][sum(high[other] == high[c] for other in range(c))]
        half = 2 ** ((codec.bits_high if high[c] else codec.bits) - 1)
        magnitude = tables[high[c]][code % half]
        frame[t, c] = (-magnitude if code >= half else magnitude) * norms[t]
    found = codec.decode_frame(streams)[0, 0].double().numpy()
    assert (np.abs(found - frame) <= 2.0**-20 * np.array(norms)[:, None]).all()


def test_the_worked_example_of_the_specification_is_reproduced() -> None:
    (block,) = re.findall(r"```example\n(.*?)```", SPEC.read_text(encoding="utf-8"), re.DOTALL)
    lines = dict(line.split(": ", 1) for line in block.strip().splitlines())
    binary = {name: bytes.fromhex(lines[name]) for name in ("high_channels", "magnitude_table", "high_magnitude_table")}
    codec = Scalar.from_params(json.loads(lines["parameters"]) | binary)
    assert codec == with_high_channels(scalar(8, b=2, high=3, share=3, rotation="none"), {0, 2, 5})
    x = torch.tensor(json.loads(lines["x"]))[None, None, None]
    # The page's example stores the norm, as the papers do.
    streams = replace(codec, norm_rule="norm").encode(x)
    for name, stream in streams.items():
        assert stream.numpy().tobytes() == bytes.fromhex(lines[name]), name
    assert [codec.unpack(name, streams)[0].flatten().tolist() for name in ("codes", "codes_high")] == [
        json.loads(lines[name]) for name in ("codes", "codes_high")
    ]
    assert torch.equal(codec.decode(streams).flatten(), torch.tensor(json.loads(lines["decoded"])))
