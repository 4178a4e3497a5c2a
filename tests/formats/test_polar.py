"""Tests of the polar codec: angles against their densities, accuracy, layout, edge cases, and the spec page's steps."""

from __future__ import annotations

import math
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.formats.errors import InvalidParameter, InvalidPayload, ValueTooLarge
from kvpack.formats.lloyd_max import CELLS, polar_angle_masses, polar_angle_table
from kvpack.formats.options import Options
from kvpack.formats.polar import Polar
from kvpack.formats.streams import DTYPE_BYTES
from support.strategies import CONTENTS, check_round_trip, contents
from support.worked_examples import example, example_params

PAGE = Path(__file__).parents[2] / "spec" / "codecs" / "polar.md"
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)


def polar(dim: int = 128, **words: Any) -> Polar:
    options = {"b": 3, **words}
    return Polar.create(dim, "k", Options("polar", {name: str(value) for name, value in options.items()}))


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def arrays(streams: dict[str, torch.Tensor]) -> dict[str, numpy.ndarray[Any, Any]]:
    return {name: stream.numpy().copy() for name, stream in streams.items()}


def row_bytes(codec: Polar) -> int:
    return sum(DTYPE_BYTES[entry.dtype] * math.prod(entry.shape) for entry in codec.layout(1, 1, 1).values())


def values_of(table: bytes) -> numpy.ndarray[Any, Any]:
    return numpy.frombuffer(table, "<f4").astype(numpy.float64)


# The recursion by the page's words, one token at a time in binary64: what the codec's tensors are compared with.


def pairs_of(dim: int, level: int) -> list[tuple[int, int]]:
    """Return the sizes of both halves of every pair on ``level``, by counting channels."""
    sizes = [1] * dim
    for _ in range(level - 1):
        sizes = [sum(sizes[i : i + 2]) for i in range(0, len(sizes), 2)]
    return [(sizes[i], sizes[i + 1]) for i in range(0, len(sizes) - 1, 2)]


def angles_of(channels: list[float], levels: int) -> tuple[list[list[float]], list[float]]:
    """Return the angles on every level, and the radii that remain."""
    radii, angles = channels, []
    for _ in range(levels):
        pairs = [radii[i : i + 2] for i in range(0, len(radii), 2)]
        angles.append([math.atan2(pair[1], pair[0]) for pair in pairs if len(pair) == 2])
        radii = [math.hypot(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return angles, radii


def channels_of(angles: list[list[float]], radii: list[float]) -> list[float]:
    for level in reversed(angles):
        pairs = zip(radii, level, strict=False)
        below = [value for radius, angle in pairs for value in (radius * math.cos(angle), radius * math.sin(angle))]
        radii = below + radii[len(level) :]
    return radii


def page_tables(codec: Polar) -> list[dict[tuple[int, int], list[float]]]:
    """Return the angles for every kind of pair on each level, read from ``angle_table`` as the page describes."""
    rest, tables = codec.angle_table, []
    for level, bits in enumerate(map(int, codec.bits.split(".")), 1):
        kinds = sorted(set(pairs_of(codec.dim, level)), reverse=True) if level > 1 else []
        tables.append({kind: list(struct.unpack_from(f"<{2**bits}f", rest, 4 * 2**bits * i)) for i, kind in enumerate(kinds)})
        rest = rest[4 * 2**bits * len(kinds) :]
    assert not rest
    return tables


def codes_of(codec: Polar, streams: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the codes on every level, int64 ``[batch, kv_head, token, angles]``, read from the streams by the page's rule."""
    bits = codec.bits.split(".")
    counts = [len(pairs_of(codec.dim, level)) for level in range(1, len(bits) + 1)]
    first = [level for level in range(len(bits)) if level == 0 or bits[level] != bits[level - 1]]
    codes: list[torch.Tensor] = []
    for start, stop in zip(first, [*first[1:], len(bits)], strict=True):
        (digit,) = codec.unpack(f"angles{start + 1}", streams)
        codes += torch.split(digit.long(), counts[start:stop], -1)
    return codes


# Densities and tables


@pytest.mark.parametrize("level", [2, 3, 5, 7])
def test_the_density_of_equal_pairs_matches_the_paper(level: int) -> None:
    """The density of equal pairs is sin^(2^(level - 1) - 1) of twice the angle (OCTOPUS, Sec. 3.2)."""
    edges = numpy.linspace(0.0, math.pi / 2, CELLS + 1)
    masses = polar_angle_masses(edges, 2 ** (level - 1), 2 ** (level - 1))
    expected = numpy.sin(edges[1:] + edges[:-1]) ** (2 ** (level - 1) - 1)
    numpy.testing.assert_allclose(masses / masses.sum(), expected / expected.sum(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("first", "second"), [(2, 2), (4, 4), (16, 16), (64, 64), (4, 2), (16, 8), (64, 16), (8, 6)], ids=str)
def test_sampled_angles_follow_the_density(first: int, second: int) -> None:
    x = gaussian(100_000, first + second).double()
    angles = torch.atan2(x[:, first:].norm(dim=-1), x[:, :first].norm(dim=-1)).numpy()
    edges = numpy.linspace(0.0, math.pi / 2, 41)
    fine = numpy.linspace(0.0, math.pi / 2, 4001)
    expected = polar_angle_masses(fine, first, second).reshape(40, 100).sum(1)
    found = numpy.histogram(angles, edges)[0] / len(angles)
    numpy.testing.assert_allclose(found, expected / expected.sum(), atol=0.004)


@pytest.mark.parametrize("levels", [2, 8, 256])
@pytest.mark.parametrize(("first", "second"), [(2, 2), (64, 64), (64, 16), (512, 512), (512, 2), (4, 2)], ids=str)
def test_angles_are_the_means_of_their_cells(first: int, second: int, levels: int) -> None:
    table = values_of(polar_angle_table(first, second, levels))
    assert len(table) == levels
    assert (numpy.diff(table) > 0).all()
    points = (numpy.arange(1 << 20) + 0.5) / (1 << 20) * math.pi / 2
    density = numpy.cos(points) ** (first - 1) * numpy.sin(points) ** (second - 1)
    nearest = numpy.searchsorted((table[1:] + table[:-1]) / 2, points)
    means = numpy.bincount(nearest, density * points, levels) / numpy.bincount(nearest, density, levels)
    numpy.testing.assert_allclose(means, table, atol=2e-6)


def test_angles_of_the_third_level_with_two_bits_are_unchanged() -> None:
    """A change of these numbers would change the bytes that every writer stores by default."""
    numpy.testing.assert_allclose(values_of(polar_angle_table(4, 4, 4)), [0.4262497, 0.6743850, 0.8964113, 1.1445466], atol=2e-7)


# The recursion


@pytest.mark.parametrize("dim", [2, 6, 10, 20, 40, 80, 112, 128, 130])
def test_levels_pair_all_channels(dim: int) -> None:
    codec = polar(dim, rotation="none")
    assert len(codec.levels) == math.ceil(math.log2(dim))
    assert codec.radii == 1
    assert sum(level.angles for level in codec.levels) == dim - 1
    for number, level in enumerate(codec.levels, 1):
        expanded = [pair for pair, count in zip(level.pairs, level.counts, strict=True) for _ in range(count)]
        assert expanded == pairs_of(dim, number)


@pytest.mark.parametrize(("dim", "b"), [(128, "3"), (80, "4.2.2.2"), (40, "4.3.2.2"), (20, "5"), (10, "3.2.2.2"), (6, "8"), (2, "6")])
def test_codes_are_the_nearest_angles(dim: int, b: str) -> None:
    codec, x = polar(dim, b=b, rotation="none", norm="fp32", norm_rule="norm"), gaussian(1, 1, 30, dim)
    streams = codec.encode(x)
    codes, tables = codes_of(codec, streams), page_tables(codec)
    for token in range(30):
        angles, radii = angles_of(x[0, 0, token].double().tolist(), len(tables))
        numpy.testing.assert_allclose(streams["radius"][0, 0, token], radii, rtol=1e-6)
        bins = 2 ** int(codec.bits[0])
        away = (numpy.array(angles[0]) * bins / (2 * math.pi) - codes[0][0, 0, token].numpy() - 0.5 + bins / 2) % bins - bins / 2
        assert (abs(away) <= 0.5 + 1e-4).all()
        for level in range(1, len(tables)):
            for angle, code, pair in zip(angles[level], codes[level][0, 0, token], pairs_of(dim, level + 1), strict=True):
                distance = numpy.abs(numpy.array(tables[level][pair]) - angle)
                assert distance[code] <= distance.min() + 1e-6


def test_angles_on_the_axes_have_the_right_codes() -> None:
    codec = polar(2, b=3, norm="fp32", rotation="none")
    x = torch.tensor([[1, 0], [1, 1e-30], [0, 1], [-1, 0.0], [0, -1], [1, -1e-30], [1, -1], [0, 0]])[None, None]
    (bins,) = codes_of(codec, codec.encode(x))
    assert bins[0, 0, :, 0].tolist() == [0, 0, 2, 4, 6, 7, 7, 0]


@settings(max_examples=25)
@given(st.data())
def test_any_codes_decode_by_the_specification_within_its_tolerance(data: st.DataObject) -> None:
    dim = data.draw(st.sampled_from([2, 4, 6, 10, 40, 80, 96, 128, 1024]))
    most = math.ceil(math.log2(dim))
    bits = data.draw(st.lists(st.integers(1, 8), min_size=min(2, most), max_size=most))
    codec = polar(dim, b=".".join(map(str, bits)), norm=data.draw(st.sampled_from(["fp16", "fp32"])), rotation="none")
    random = numpy.random.default_rng(data.draw(st.integers(0, 2**32)))
    streams: dict[str, torch.Tensor] = {}
    for name, packing in codec.packings().items():
        streams |= codec.pack(name, torch.from_numpy(random.integers(0, packing.bases[0], (1, 1, 2, packing.symbols))))
    radius = torch.from_numpy(random.normal(size=(1, 1, 2, codec.radii)) * 2.0 ** random.integers(-20, 10))
    streams["radius"] = radius.to(torch.float16 if codec.norm == "fp16" else torch.float32)
    codec.check(arrays(streams), "x")
    decoded, codes, tables = codec.decode(streams), codes_of(codec, streams), page_tables(codec)
    for token in range(2):
        angles = [[(int(k) + 0.5) * 2 * math.pi / 2 ** bits[0] for k in codes[0][0, 0, token]]]
        for level in range(1, len(codec.bits.split("."))):
            pairs = pairs_of(dim, level + 1)
            angles.append([tables[level][pair][int(k)] for pair, k in zip(pairs, codes[level][0, 0, token], strict=True)])
        radii = streams["radius"][0, 0, token].double()
        exact = numpy.array(channels_of(angles, radii.tolist()))
        allowed = radii.abs().repeat_interleave(2 ** len(angles))[:dim].numpy() * 2.0**-19 + 2.0**-118
        assert (numpy.abs(decoded[0, 0, token].double().numpy() - exact) <= allowed).all()


# Accuracy and rate


@pytest.mark.parametrize(("b", "error", "cosine"), [(2, 0.2197, 0.8902), (3, 0.0571, 0.9715), (4, 0.0145, 0.9928)], ids=str)
def test_accuracy_equals_the_papers(b: int, error: float, cosine: float) -> None:
    """Expected values are from OCTOPUS, Table 1, for Gaussian keys with d = 128."""
    codec, x = polar(b=b, norm_rule="norm"), gaussian(1, 2, 2048, 128)
    decoded = codec.decode(codec.encode(x))
    assert (decoded - x).square().mean().item() == pytest.approx(error, rel=0.02)
    assert torch.cosine_similarity(decoded, x, dim=-1).mean().item() == pytest.approx(cosine, abs=1e-3)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_accuracy_is_the_same_at_every_head_dim(dim: int) -> None:
    """Pairs of unequal radii are as accurate as equal ones, because they have their own table."""
    codec, x = polar(dim, norm_rule="norm"), gaussian(1, 2, 1500, dim)
    assert (codec.decode(codec.encode(x)) - x).square().mean().item() == pytest.approx(0.0571, rel=0.02)


def test_accuracy_does_not_depend_on_key_norms() -> None:
    codec, x = polar(norm="fp32", norm_rule="norm"), gaussian(1, 1, 64, 128)
    for factor in (2.0**-110, 2.0**-20, 2.0**20, 2.0**110):
        decoded = codec.decode(codec.encode(x * factor)) / factor
        assert (decoded - x).square().mean().item() == pytest.approx(0.0571, rel=0.03)


def test_blocks_of_sixteen_have_the_expected_accuracy() -> None:
    """For independent angles in equal blocks, the expected MSE is exactly 2 (1 - product of the mean cosines)."""
    codec, x = polar(b="4.2.2.2", norm_rule="norm"), gaussian(1, 2, 2048, 128)
    bins = 2**4
    cosine = math.sin(math.pi / bins) / (math.pi / bins)
    for level in (2, 3, 4):
        n = 2 ** (level - 1)
        table = values_of(polar_angle_table(n, n, 4))
        points = (numpy.arange(20_000) + 0.5) / 20_000 * math.pi / 2
        density = numpy.sin(2 * points) ** (n - 1)
        away = numpy.cos(points - table[numpy.searchsorted((table[1:] + table[:-1]) / 2, points)])
        cosine *= float((away * density).sum() / density.sum())
    error = (codec.decode(codec.encode(x)) - x).square().mean().item()
    assert error == pytest.approx(2 * (1 - cosine), rel=0.02)


@pytest.mark.parametrize(
    ("dim", "words", "bits", "nominal"),
    [
        (128, {"b": 2}, 2.125, 2),
        (128, {"b": 3}, 3.125, 3),
        (128, {"b": 4}, 4.125, 4),
        (128, {"b": 3, "norm": "fp32"}, 3.25, 3),
        (80, {"b": 3}, 3.2, 3),
        (128, {"b": "4.2.2.2"}, 3.875, 3.875),
        (96, {"b": "4.2.2.2"}, 4.0, 3.875),
        (128, {"b": "2.2.2.2"}, 2.875, 2.875),
    ],
    ids=str,
)
def test_stored_bits_and_nominal_bits_match_the_papers(dim: int, words: dict[str, Any], bits: float, nominal: float) -> None:
    """PolarQuant counts 62 bits for 16 channels with the bits 4.2.2.2."""
    codec = polar(dim, **words)
    assert row_bytes(codec) * 8 / dim == bits
    assert codec.nominal_bits == pytest.approx(nominal)


# Layout


@pytest.mark.parametrize(
    ("dim", "b", "streams", "radii"),
    [
        (128, "3", {"angles1": (127, 8)}, 1),
        (128, "4.2.2.2", {"angles1": (64, 16), "angles2": (56, 4)}, 8),
        (80, "4.4.2.3.3", {"angles1": (60, 16), "angles3": (10, 4), "angles4": (7, 8)}, 3),
        (40, "2.2.2.2", {"angles1": (37, 4)}, 3),
        (2, "5", {"angles1": (1, 32)}, 1),
    ],
    ids=str,
)
def test_levels_with_equal_bits_share_a_stream(dim: int, b: str, streams: dict[str, tuple[int, int]], radii: int) -> None:
    codec = polar(dim, b=b, rotation="none")
    assert {name: (packing.symbols, packing.bases[0]) for name, packing in codec.packings().items()} == streams
    assert codec.layout(2, 3, 5)["radius"].shape == (2, 3, 5, radii)


def test_the_worked_example_of_the_specification_is_reproduced() -> None:
    params = example_params(PAGE)
    params |= {name: int(params[name]) for name in ("dim", "seed")}
    tables = example(PAGE, "angle_table", "bytes", "angles")
    params["angle_table"] = bytes.fromhex("".join(row["bytes"] for row in tables))
    codec = Polar.from_params(params)
    assert codec == polar(10, b=params["bits"], rotation="none")
    for row, (table,) in zip(tables, codec.tables[1:], strict=True):
        numpy.testing.assert_allclose(values_of(table), [float(angle) for angle in row["angles"].split()], atol=5e-7)
    source = re.findall(r"what was encoded is `([^`]*)`", PAGE.read_text(encoding="utf-8"))[0]
    # The page's example stores the norm, as the papers do.
    streams = replace(codec, norm_rule="norm").encode(torch.tensor([float(value) for value in source.split()])[None, None, None])
    layout = codec.layout(1, 1, 1)
    rows = example(PAGE, "stream", "dtype", "shape", "bytes")
    assert [(row["stream"], row["dtype"], row["shape"]) for row in rows] == [
        (name, entry.dtype, " ".join(map(str, entry.shape))) for name, entry in layout.items()
    ]
    assert [streams[row["stream"]].numpy().tobytes() for row in rows] == [bytes.fromhex(row["bytes"]) for row in rows]
    steps = {int(row["level"]): row for row in example(PAGE, "level", "codes", "radii of the level below")}
    for level, codes in enumerate(codes_of(codec, streams), 1):
        assert codes.flatten().tolist() == [int(code) for code in steps[level]["codes"].split()]
        below = [float(value) for value in steps[level]["radii of the level below"].split()]
        _, radii = angles_of(codec.decode(streams)[0, 0, 0].double().tolist(), level - 1)
        numpy.testing.assert_allclose(radii, below, rtol=0, atol=2e-6)


def test_sizes_match_the_specification() -> None:
    text = PAGE.read_text(encoding="utf-8").split("## Decode")[0]
    rows = re.findall(r"^\| (\d+) \| (\d)(?: at all 7 levels|((?:\.\d)+)) \| (\d+) \| ([\d.]+) \|$", text, re.MULTILINE)
    assert len(rows) == 3
    for dim, first, others, size, bits in rows:
        codec = polar(int(dim), b=first + others)
        assert len(codec.levels) == (4 if others else 7)
        assert (row_bytes(codec), row_bytes(codec) * 8 / codec.dim) == (int(size), float(bits))


# Inputs


@pytest.mark.parametrize("words", [{"b": 2}, {"b": 8, "norm": "fp32"}, {"b": "4.2.2.2"}, {"b": "1.3.3.2.1"}], ids=str)
@pytest.mark.parametrize("dim", [*HEAD_DIMS, 20, 40])
def test_every_head_dim_is_supported(dim: int, words: dict[str, Any]) -> None:
    for kind, tokens in (("outliers", 37), ("gaussian", 1), ("gaussian", 0)):
        assert check_round_trip(polar(dim, seed=3, **words), contents(kind, (1, 2, tokens, dim), seed=dim))


@pytest.mark.parametrize("dim", [2, 4, 6, 10, 66, 100, 126, 130, 1022])
def test_head_dims_without_a_rotation_are_encoded_without_one(dim: int) -> None:
    codec, x = polar(dim, b=6, rotation="none", norm="fp32"), gaussian(1, 1, 20, dim)
    assert check_round_trip(codec, x)
    assert (codec.decode(codec.encode(x)) - x).square().mean() < 0.0015


@pytest.mark.parametrize("norm", ["fp16", "fp32"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_all_kinds_of_values_are_decoded_within_the_bound(kind: str, norm: str) -> None:
    for words in ({"b": 3}, {"b": "4.2.2.2", "rotation": "none"}, {"b": 1, "rotation": "none"}):
        assert check_round_trip(polar(40, norm=norm, **words), contents(kind, (2, 3, 7, 40), seed=1)) or kind == "large"


@settings(max_examples=15)
@given(st.data())
def test_values_survive_a_round_trip_within_the_bound(data: st.DataObject) -> None:
    dim = 2 * data.draw(st.integers(1, 70))
    bits = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=(dim - 1).bit_length()))
    codec = polar(dim, b=".".join(map(str, bits)), norm=data.draw(st.sampled_from(["fp16", "fp32"])), rotation="none")
    x = contents(data.draw(st.sampled_from(CONTENTS)), (1, 2, data.draw(st.integers(0, 9)), dim), data.draw(st.integers(0, 2**32)))
    check_round_trip(codec, x)


@pytest.mark.parametrize("norm", ["fp16", "fp32"])
@pytest.mark.parametrize("b", ["3", "4.2.2.2"])
def test_zero_tokens_among_others_decode_to_exact_zeros(b: str, norm: str) -> None:
    codec, x = polar(b=b, norm=norm), gaussian(1, 2, 6, 128)
    alone = codec.decode(codec.encode(x))
    x[0, 1, 3] = 0
    decoded = codec.decode(codec.encode(x))
    assert torch.equal(decoded[0, 1, 3], torch.zeros(128))
    kept = torch.ones(1, 2, 6, dtype=torch.bool)
    kept[0, 1, 3] = False
    torch.testing.assert_close(decoded[kept], alone[kept])


def test_a_zero_block_decodes_to_exact_zeros() -> None:
    codec, x = polar(b="4.2.2.2", rotation="none"), gaussian(1, 1, 3, 128)
    x[..., 16:32] = 0
    decoded = codec.decode(codec.encode(x))
    assert torch.equal(decoded[..., 16:32], torch.zeros(1, 1, 3, 16))
    assert (decoded[..., 32:] != 0).any()


@pytest.mark.parametrize("value", [1e-45, 1e-39, 1e-20, 3e-5, 1.0, 5e3, 1e18, 2.9e37], ids=str)
@pytest.mark.parametrize("pattern", ["constant", "one channel", "normal"])
def test_finite_values_of_any_size_are_encoded_with_fp32_radii(value: float, pattern: str) -> None:
    codec = polar(b=5, norm="fp32")
    patterns = {"constant": torch.ones(2, 128), "one channel": torch.eye(2, 128), "normal": gaussian(2, 128).clamp(-1, 1)}
    x = patterns[pattern][None, None] * value
    decoded = codec.decode(codec.encode(x))
    assert torch.isfinite(decoded).all()
    assert (decoded.double() - x.double()).norm() <= 0.2 * x.double().norm() + 2e-45 * 128


def test_errors_give_the_position_of_huge_radii_which_fit_in_fp32() -> None:
    x = gaussian(1, 2, 5, 128)
    x[0, 1, 3] *= 1e9
    with pytest.raises(ValueTooLarge, match=r"a radius \(token 0 or later\) at \[0, 1, 3, 0\] is .*largest float16 value is 65504"):
        polar().encode(x)
    codec = polar(b=5, norm="fp32")
    assert (codec.decode(codec.encode(x)) - x)[0, 1, 3].norm() < 0.1 * x[0, 1, 3].norm()
    codec, large = polar(b="4.2.2.2", norm="fp32", rotation="none"), torch.zeros(1, 1, 1, 128)
    large[..., 32:48] = 3e38
    with pytest.raises(ValueTooLarge, match=r"a radius \(token 0 or later\) at \[0, 0, 0, 2\].*float32"):
        codec.encode(large)


def test_block_size_does_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, x = polar(b="4.2.2.2", rotation="none"), gaussian(2, 3, 41, 128)
    expected = codec.encode(x)
    monkeypatch.setattr("kvpack.formats.polar._HEAD_TOKENS_PER_BLOCK", 24)
    found = codec.encode(x)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_input_is_not_modified() -> None:
    x = gaussian(1, 1, 9, 128)
    polar(rotation="none").encode(x)
    assert torch.equal(x, gaussian(1, 1, 9, 128))


# Refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"b": 0}, "b is '0', expected integers from 1 to 8 separated by dots"),
        ({"b": 9}, "b is '9'"),
        ({"b": "4..2"}, "b is '4..2'"),
        ({"b": "4.2.2.2.2.2.2.2"}, "bits is '4.2.2.2.2.2.2.2', expected 1 to 7 integers from 1 to 8, separated by dots, at dim 128"),
        ({"dim": 127}, "dim is 127, expected an even number"),
        ({"dim": 0}, "dim is 0, expected 2 to 1024"),
        ({"dim": 1026}, "dim is 1026, expected 2 to 1024"),
        ({"dim": 66}, "no Hadamard rotation for 66 channels"),
        ({"norm": "bf16"}, "expected one of fp16, fp32"),
        ({"n": 3}, "no option 'n'"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        polar(**words)


def test_bits_are_required() -> None:
    with pytest.raises(InvalidParameter, match="needs b="):
        Polar.create(128, "k", Options("polar", {}))


def test_equal_bits_written_individually_give_the_same_codec() -> None:
    assert polar(64, b=3) == polar(64, b="3.3.3.3.3.3")
    assert polar(64, b=3).bits == "3.3.3.3.3.3"


SECOND = numpy.array([0.2, 0.6, 0.9, 1.3], "<f4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 5}, "dim is 5, expected an even number"),
        ({"dim": 4, "bits": "2.2.2"}, "expected 1 to 2 integers"),
        ({"bits": ""}, "bits is ''"),
        ({"bits": "2.0"}, "bits is '2.0'"),
        ({"bits": "2.02"}, "bits is '2.02'"),
        ({"bits": "2.-2"}, "bits is '2.-2'"),
        ({"bits": "2.٢"}, "bits is '2.٢'"),
        ({"bits": "2.3"}, "angle_table has 16 bytes, expected 32 for 8 float32 angles"),
        ({"dim": 6, "bits": "2.2.2"}, "angle_table has 16 bytes, expected 32 for 8 float32 angles"),
        ({"angle_table": b""}, "angle_table has 0 bytes, expected 16 for 4 float32 angles"),
        ({"angle_table": SECOND[[0, 1, 1, 2]].tobytes()}, "the angles of level 2 must be in [0, pi / 2] and strictly ascending"),
        ({"angle_table": (SECOND - numpy.float32(0.3)).tobytes()}, "the angles of level 2 must be in [0, pi / 2] and strictly ascending"),
        ({"angle_table": (SECOND + numpy.float32(0.3)).tobytes()}, "the angles of level 2 must be in [0, pi / 2] and strictly ascending"),
        ({"angle_table": numpy.array([0.2, numpy.nan, 0.9, 1.3], "<f4").tobytes()}, "level 2 must be in [0, pi / 2] and"),
        ({"norm": "F16"}, "norm is 'F16'"),
        ({"seed": 2**64}, "seed is"),
        ({"rotation_kind": "givens"}, "rotation_kind is 'givens'"),
        ({"fields": ()}, "fields must name the streams angles1, but names none"),
        ({"bits": "3.2"}, "fields must name the streams angles1, angles2, but names angles1"),
        ({"fields": (("angles1", 0),)}, "the number of fields is 0"),
        ({"fields": (("angles1", 65),)}, "16 bytes"),
    ],
    ids=str,
)
def test_invalid_headers_are_refused(change: dict[str, Any], message: str) -> None:
    codec = replace(polar(4, b=2), angle_table=SECOND.tobytes())
    with pytest.raises(InvalidParameter, match=re.escape(message)):
        replace(codec, **change)


def test_a_file_may_have_its_own_tables_and_fields() -> None:
    codec = polar(64, b=2)
    own = replace(codec, angle_table=numpy.tile(SECOND, 5).tobytes(), fields=(("angles1", 3),))
    x = gaussian(1, 1, 3, 64)
    streams = own.encode(x)
    own.check(arrays(streams), "x")
    assert Polar.from_params({name: value for name, value in own.params().items() if name != "id"}) == own
    assert codes_of(own, streams)[1].unique().tolist() == [0, 1, 2, 3]
    assert not torch.equal(own.decode(streams), codec.decode(codec.encode(x)))


@pytest.mark.parametrize(
    ("words", "stream", "word", "message"),
    [
        ({}, "angles1.1", 1 << 15, "spare bits"),
        ({"b": "4.2.2.2", "dim": 24}, "angles2.0", 0x8000, "spare bits"),
        ({}, "radius", 0x7C00, "the value at .* is inf"),
        ({"norm": "fp32"}, "radius", 0x7FC00000, "the value at .* is nan"),
    ],
    ids=["spare field", "spare bit", "infinity", "NaN"],
)
def test_streams_that_no_writer_may_produce_are_refused(words: dict[str, Any], stream: str, word: int, message: str) -> None:
    codec = polar(**words)
    streams = arrays(codec.encode(gaussian(1, 2, 3, codec.dim)))
    codec.check(streams, "x")
    array = streams[stream]
    array.view(f"u{array.itemsize}").flat[array.shape[-1] - 1] = word
    with pytest.raises(InvalidPayload, match=message):
        codec.check(streams, "x")
