"""Tests of the quaternion codec: codewords, both searches against brute force, accuracy, layout, and edge cases."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.formats import quaternion_search
from kvpack.formats.errors import InvalidParameter, InvalidPayload, ValueTooLarge
from kvpack.formats.generator import unit_quaternions
from kvpack.formats.options import Options
from kvpack.formats.quaternion import Quaternion
from kvpack.formats.quaternion_search import CodebookSearch, Grid
from kvpack.formats.streams import DTYPE_BYTES
from support.strategies import CONTENTS, check_round_trip, contents
from support.worked_examples import example, example_codec, example_streams

PAGE = Path(__file__).parents[2] / "spec" / "codecs" / "quaternion.md"
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)


def quaternion(dim: int = 128, **words: Any) -> Quaternion:
    options = {"s": 24, "r": 3, **words}
    return Quaternion.create(dim, "k", Options("quaternion", {name: str(value) for name, value in options.items()}))


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def row_bytes(codec: Quaternion) -> int:
    return sum(DTYPE_BYTES[entry.dtype] * int(numpy.prod(entry.shape)) for entry in codec.layout(1, 1, 1).values())


def arrays(streams: dict[str, torch.Tensor]) -> dict[str, numpy.ndarray[Any, Any]]:
    return {name: stream.numpy().copy() for name, stream in streams.items()}


def search(secondary: int, seed: int = 435) -> CodebookSearch:
    codebook = quaternion(s=secondary, seed=seed).codebook
    return CodebookSearch(torch.tensor(unit_quaternions(seed, secondary), dtype=torch.float32), codebook)


def units() -> list[tuple[float, ...]]:
    """Return the Hurwitz units in the order of the specification."""
    axes = [tuple(float(sign) * (i == axis) for i in range(4)) for axis in range(4) for sign in (1, -1)]
    return axes + [tuple(-0.5 if bits >> i & 1 else 0.5 for i in range(4)) for bits in range(16)]


def product(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, float, float, float]:
    """Return the Hamilton product, computed from the rules for i, j and k."""
    # Row i, column j: the sign and the place of the product of the i-th and j-th of 1, i, j, k.
    rules = [
        [(1, 0), (1, 1), (1, 2), (1, 3)],
        [(1, 1), (-1, 0), (1, 3), (-1, 2)],
        [(1, 2), (-1, 3), (-1, 0), (1, 1)],
        [(1, 3), (1, 2), (-1, 1), (-1, 0)],
    ]
    total = [0.0] * 4
    for i, j in itertools.product(range(4), repeat=2):
        sign, place = rules[i][j]
        total[place] += sign * left[i] * right[j]
    return total[0], total[1], total[2], total[3]


# Codewords


def test_units_form_a_group_with_adjacent_negatives() -> None:
    known = {unit: p for p, unit in enumerate(units())}
    assert all(product(a, b) in known for a, b in itertools.product(known, repeat=2))
    for unit, p in known.items():
        assert known[tuple(-value + 0.0 for value in unit)] == (p ^ 1 if p < 8 else 31 - p)


@pytest.mark.parametrize("secondary", [1, 3, 24])
def test_codewords_are_units_times_secondary_quaternions(secondary: int) -> None:
    codebook = quaternion(s=secondary, seed=5).codebook
    rounded = torch.tensor(unit_quaternions(5, secondary), dtype=torch.float32).tolist()
    expected = torch.tensor([product(unit, tuple(q)) for q in rounded for unit in units()], dtype=torch.float64)
    torch.testing.assert_close(codebook.double(), expected, rtol=0, atol=2.0**-24)
    assert codebook.dtype == torch.float32
    assert codebook.shape == (24 * secondary, 4)


# The search


def directions(codebook: torch.Tensor) -> torch.Tensor:
    """Return chunks of every kind.

    They are random, codewords, halfway between codewords, on axes, edges, or the fold of the map, zero, and tiny.
    """
    random = gaussian(6_000, 4, seed=len(codebook))
    middle = codebook[torch.randperm(len(codebook), generator=torch.Generator().manual_seed(1))[:1000]] + codebook[:1000]
    corners = torch.cartesian_prod(*[torch.tensor([-1.0, -0.5, -0.0, 1e-6, 0.25, 1.0])] * 4)
    folded = random[:1000] * torch.tensor([1e-7, 1.0, 1.0, 1.0])
    return torch.cat([random, codebook[:1000], middle, corners, folded, random[:100] * 2.0**-80, torch.zeros(1, 4)])


def check_nearest(found: torch.Tensor, chunks: torch.Tensor, codebook: torch.Tensor) -> None:
    """Check that ``found`` equals the brute-force result over all codewords, except where the two best differ only by rounding."""
    for part, chosen in zip(torch.split(chunks.double(), 4096), torch.split(found, 4096), strict=True):
        scores = part @ codebook.double().T
        best, wanted = scores.max(1)
        lost = best - scores.gather(1, chosen[:, None].long())[:, 0]
        assert (lost <= 2.0**-20 * part.norm(dim=1)).all()
        ahead = best - scores.topk(2).values[:, 1] > 2.0**-20 * part.norm(dim=1)
        assert torch.equal(chosen[ahead], wanted[ahead].int())


@pytest.mark.scenario
@pytest.mark.parametrize("kind", ["search_rotations", "search_grid", "search_products"])
@pytest.mark.parametrize("secondary", [1, 5, 24, 48, 192])
def test_both_searches_equal_brute_force(secondary: int, kind: str) -> None:
    searched = search(secondary)
    codebook = quaternion(s=secondary).codebook
    chunks = directions(codebook)
    check_nearest(getattr(searched, kind)(list(chunks.T.contiguous())), chunks, codebook)


@pytest.mark.parametrize("resolution", [2, 4, 128])
def test_grids_of_any_resolution_equal_brute_force(resolution: int) -> None:
    codebook = quaternion().codebook
    chunks = directions(codebook)
    check_nearest(Grid(codebook, resolution).nearest(list(chunks.T.contiguous())), chunks, codebook)


def test_ties_are_broken_independently_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = search(24)
    planes = list(torch.cartesian_prod(*[torch.tensor([-1.0, 0.0, 1.0])] * 4).T.contiguous())
    expected = searched.search_rotations(planes)
    monkeypatch.setattr(quaternion_search, "_BLOCK", 7)
    assert torch.equal(searched.search_rotations(planes), expected)


def test_the_grid_is_used_once_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quaternion_search, "_GRID_BREAK_EVEN", 2000)
    calls: list[torch.Tensor] = []
    built: list[int] = []

    def build(codebook: torch.Tensor) -> Grid:
        built.append(len(calls))
        return Grid(codebook, 8)

    monkeypatch.setattr(quaternion_search, "Grid", build)
    searched, planes = search(24), list(gaussian(4, 800))
    for _ in range(4):
        searched.announce(800, planes[0].device)
        calls.append(searched.nearest(planes))
    assert built == [2]
    assert all(torch.equal(calls[0], other) for other in calls)


# Accuracy and rate


@pytest.mark.parametrize(
    ("secondary", "radius_bits", "error", "bits"),
    [
        (24, 3, 0.0404, 3.28),
        (24, 4, 0.0365, 3.53),
        (48, 4, 0.0243, 3.78),
        (96, 4, 0.0160, 4.03),
        (192, 4, 0.0102, 4.28),
        (192, 6, 0.0092, 4.78),
    ],
    ids=lambda value: str(value),
)
def test_errors_and_stored_bits_match_the_paper(secondary: int, radius_bits: int, error: float, bits: float) -> None:
    codec = quaternion(s=secondary, r=radius_bits, norm_rule="norm")
    x = gaussian(1, 1, 4096, 128, seed=3)
    found = (codec.decode(codec.encode(x)) - x).square().mean().item()
    assert found == pytest.approx(error, rel=0.02)
    assert row_bytes(codec) * 8 / 128 <= bits
    assert codec.nominal_bits == pytest.approx((numpy.log2(24 * secondary) + radius_bits) / 4 + 0.125)


def test_direct_symbols_are_13_bits_in_one_word() -> None:
    codec = quaternion(arrangement="direct")
    (symbol,) = codec.packings().values()
    assert (symbol.bases, symbol.alphabets, symbol.fields, symbol.planes) == ((1024, 8), (576, 8), 1, (32,))
    assert symbol.column_values == 2**13
    assert row_bytes(codec) == 66


def test_radius_codes_are_the_nearest_to_the_stored_scale() -> None:
    codec = quaternion(r=4, norm_rule="norm")
    x = gaussian(1, 2, 100, 128) * 1000
    streams = codec.encode(x)
    radii = x.reshape(1, 2, 100, 32, 4).norm(dim=-1)
    assert torch.equal(streams["scale"], radii.amax(-1).half())
    step = streams["scale"].float()[..., None] / 15
    (codes,) = codec.unpack("radius", streams)
    # Only the largest radius, where its scale was rounded down, may be further from its code than half a step.
    assert ((codes * step - radii).abs() <= step * (0.5 + 15 * 2.0**-11)).all()


# Layout


@settings(max_examples=25)
@given(st.integers(1, 300), st.one_of(st.integers(1, 4096), st.sampled_from([24, 48, 96, 192, 2730, 2731])), st.integers(1, 8))
def test_codewords_are_split_if_that_is_smaller(dim: int, secondary: int, radius_bits: int) -> None:
    codec = quaternion(dim, s=secondary, r=radius_bits)
    chunks, alphabet = -(-dim // 4), 24 * secondary
    low = next(2**k for k in range(20) if alphabet % 2 ** (k + 1))

    def fewest(base: int) -> int:
        sizes: list[int] = []
        for fields in range(1, min(chunks, 128) + 1):
            if base**fields > (2**128 if base & (base - 1) == 0 else 2**53):
                break
            width, column = -(-chunks // fields), -(-(base**fields - 1).bit_length() // 8)
            sizes.append(2 * (width * (column // 2) + -(-width // 2) * (column % 2)))
        return min(sizes)

    split = alphabet > 65536 or fewest(low) + fewest(alphabet // low) < fewest(alphabet)
    assert [name for name, _ in codec.fields] == (["codeword_low", "codeword_high"] if split else ["codeword"]) + ["radius"]
    best = fewest(low) + fewest(alphabet // low) if split else fewest(alphabet)
    assert row_bytes(codec) == best + fewest(2**radius_bits) + 2


@settings(max_examples=15)
@given(st.data())
def test_any_codes_decode_by_the_formula(data: st.DataObject) -> None:
    dim, secondary = data.draw(st.sampled_from([1, 4, 62, 128])), data.draw(st.sampled_from([1, 24, 100, 2730]))
    radius_bits = data.draw(st.integers(1, 8))
    random = numpy.random.default_rng(data.draw(st.integers(0, 2**32)))
    shape = (1, 2, 3, -(-dim // 4))
    codeword, radius = random.integers(0, 24 * secondary, shape), random.integers(0, 2**radius_bits, shape)
    scale = torch.from_numpy((random.integers(0, 0x7C00, shape[:3])).astype(numpy.uint16).view(numpy.float16))
    decoded = []
    for arrangement in ("dense", "direct"):
        codec = quaternion(dim, s=secondary, r=radius_bits, arrangement=arrangement)
        packings = codec.packings()
        if arrangement == "direct":
            digits = {"symbol": [codeword, radius]}
        elif "codeword" in packings:
            digits = {"codeword": [codeword], "radius": [radius]}
        else:
            low = packings["codeword_low"].bases[0]
            digits = {"codeword_low": [codeword % low], "codeword_high": [codeword // low], "radius": [radius]}
        streams = {"scale": scale}
        for name, values in digits.items():
            streams |= codec.pack(name, *map(torch.from_numpy, values))
        codec.check(arrays(streams), "x")
        decoded.append(codec.decode(streams))
    assert torch.equal(decoded[0], decoded[1])
    radii = torch.from_numpy(radius) * scale.double()[..., None] / (2**radius_bits - 1)
    exact = (radii[..., None] * codec.codebook[codeword].double()).flatten(3)[..., :dim]
    assert ((decoded[0].double() - exact).abs() <= exact.abs() * 2.0**-22).all()


def test_the_worked_example_of_the_specification_is_reproduced() -> None:
    codec = example_codec(PAGE, Quaternion)
    assert isinstance(codec, Quaternion)
    streams = example_streams(PAGE, codec)
    codec.check(arrays(streams), "example")
    for token, row in enumerate(example(PAGE, "token", "scale", "codewords", "radius codes")):
        assert streams["scale"][0, 0, token].item() == numpy.float32(row["scale"])
        for name, stream in (("codewords", "codeword"), ("radius codes", "radius")):
            assert codec.unpack(stream, streams)[0][0, 0, token].tolist() == [int(value) for value in row[name].split()]
    values = torch.tensor([[float(value) for value in row["values"].split()] for row in example(PAGE, "token", "values")])
    torch.testing.assert_close(codec.decode(streams)[0, 0], values, rtol=2.0**-22, atol=0)


# Inputs


@pytest.mark.parametrize("arrangement", ["dense", "direct"])
@pytest.mark.parametrize("dim", [*HEAD_DIMS, 1, 2, 5, 63])
def test_every_head_dim_is_supported(dim: int, arrangement: str) -> None:
    for kind, tokens in (("outliers", 37), ("gaussian", 1), ("gaussian", 0)):
        rotation = "signed-hadamard" if dim in HEAD_DIMS else "none"
        codec = quaternion(dim, arrangement=arrangement, rotation=rotation, rotation_seed=3)
        assert check_round_trip(codec, contents(kind, (1, 2, tokens, dim), seed=dim))


@pytest.mark.parametrize("norm", ["fp16", "fp32"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_all_kinds_of_values_are_decoded_within_the_bound(kind: str, norm: str) -> None:
    accepted = check_round_trip(quaternion(62, norm=norm), contents(kind, (2, 3, 7, 62), seed=1))
    assert accepted or (kind == "large" and norm == "fp16")


def test_block_size_does_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, x = quaternion(), gaussian(2, 3, 41, 128)
    expected = codec.encode(x)
    monkeypatch.setattr("kvpack.formats.quaternion._HEAD_TOKENS_PER_BLOCK", 24)
    found = codec.encode(x)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("power", [-130, -60, 60, 120])
def test_a_power_of_two_changes_only_the_scale(power: int) -> None:
    codec = quaternion(norm="fp32")
    x = torch.randint(-64, 65, (1, 1, 50, 128), generator=torch.Generator().manual_seed(0)).float()
    plain, scaled = codec.encode(x), codec.encode(x * 2.0 ** (power // 2) * 2.0 ** (power - power // 2))
    assert torch.equal(plain.pop("scale").double() * 2.0**power, scaled.pop("scale").double()) or power < -126
    assert all(torch.equal(plain[name], scaled[name]) for name in plain)


def test_padding_of_the_last_chunk_is_dropped() -> None:
    codec, padded = quaternion(62, norm="fp32"), quaternion(64, norm="fp32")
    x = gaussian(1, 2, 9, 62)
    wide = torch.nn.functional.pad(x, (0, 2))
    assert torch.equal(codec.decode(codec.encode(x)), padded.decode(padded.encode(wide))[..., :62])


def test_the_two_seeds_are_independent() -> None:
    x = gaussian(1, 1, 64, 128)
    plain = quaternion(rotation="signed-hadamard").encode(x)
    for other in (quaternion(rotation="signed-hadamard", seed=1), quaternion(rotation="signed-hadamard", rotation_seed=1)):
        assert any(not torch.equal(plain[name], stream) for name, stream in other.encode(x).items())
    assert torch.equal(quaternion(seed=1).codebook, quaternion(seed=1, rotation_seed=8).codebook)


def test_a_scale_above_binary16_is_refused_but_fits_in_fp32() -> None:
    x = gaussian(1, 2, 5, 128)
    x[0, 1, 3] *= 1e6
    with pytest.raises(ValueTooLarge, match=r"a token's scale \(token 0 or later\) at \[0, 1, 3\] is .*largest float16 value is 65504"):
        quaternion().encode(x)
    codec = quaternion(norm="fp32")
    assert (codec.decode(codec.encode(x)) - x)[0, 1, 3].norm() < 0.3 * x[0, 1, 3].norm()
    with pytest.raises(ValueTooLarge, match="float32"):
        codec.encode(torch.full((1, 1, 1, 128), 3e38))


@pytest.mark.parametrize("radius_bits", range(1, 9), ids=lambda bits: f"{bits} bits")
def test_values_that_would_decode_to_infinity_are_refused(radius_bits: int) -> None:
    codec = quaternion(dim=4, r=radius_bits, norm="fp32")
    x = torch.zeros(1, 1, 1, 4)
    x[..., 0] = torch.finfo(torch.float32).max
    if radius_bits in (5, 7):
        with pytest.raises(ValueTooLarge, match="decoded largest radius of a token"):
            codec.encode(x)
    else:
        assert torch.isfinite(codec.decode(codec.encode(x))).all()


# Refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"s": 0}, "1 to 4096"),
        ({"s": 4097}, "1 to 4096"),
        ({"r": 0}, "1 to 8"),
        ({"r": 9}, "1 to 8"),
        ({"s": 2731, "arrangement": "direct"}, "secondary is 2731, expected 1 to 2730 for the direct arrangement"),
        ({"arrangement": "loose"}, "dense, direct"),
        ({"norm": "bf16"}, "fp16, fp32"),
        ({"seed": -1}, "seed"),
        ({"b": 3}, "no option 'b'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_options_out_of_range_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        quaternion(**words)


def test_s_and_r_are_required() -> None:
    for words in ({"s": "24"}, {"r": "3"}):
        with pytest.raises(InvalidParameter, match="needs"):
            Quaternion.create(128, "k", Options("quaternion", words))


@pytest.mark.parametrize(
    "change",
    [
        {"secondary": 0},
        {"radius_bits": 9},
        {"dim": 0},
        {"dim": 1025},
        {"seed": 2**64},
        {"rotation_seed": -1},
        {"norm": "F16"},
        {"arrangement": "direct"},
        {"rotation_kind": "givens"},
        {"fields": ()},
        {"fields": (("codeword", 5), ("radius", 8))},
        {"fields": (("codeword_high", 5), ("codeword_low", 4), ("radius", 8))},
        {"fields": (("codeword_low", 4), ("codeword_high", 5), ("radius", 0))},
        {"fields": (("codeword_low", 4), ("codeword_high", 17), ("radius", 8))},
        {"dim": 66, "rotation_kind": "hadamard"},
    ],
    ids=str,
)
def test_invalid_headers_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        replace(quaternion(), **change)


def test_other_numbers_of_fields_are_read() -> None:
    codec = replace(quaternion(), fields=(("codeword_low", 1), ("codeword_high", 10), ("radius", 10)))
    assert check_round_trip(codec, gaussian(1, 2, 5, 128))


@pytest.mark.parametrize(
    ("arrangement", "stream", "word", "message"),
    [
        ("direct", "symbol.0", 576, "symbol of field 0 at .* is 576, expected at most 575"),
        ("direct", "symbol.0", 1 << 13, "spare bits"),
        ("dense", "codeword_high.0", 9**5, "column at .* is 59049, expected at most 59048"),
        ("dense", "scale", 0x7C00, "the value at .* is inf"),
        ("dense", "scale", 0x7E00, "the value at .* is nan"),
    ],
    ids=["codeword", "spare bit", "column", "infinity", "NaN"],
)
def test_streams_that_no_writer_may_produce_are_refused(arrangement: str, stream: str, word: int, message: str) -> None:
    codec = quaternion(arrangement=arrangement)
    streams = arrays(codec.encode(gaussian(1, 2, 3, 128)))
    codec.check(streams, "x")
    streams[stream].view(numpy.uint16).flat[0] = word
    with pytest.raises(InvalidPayload, match=message):
        codec.check(streams, "x")


def test_an_unused_field_is_refused() -> None:
    codec = quaternion()
    streams = arrays(codec.encode(gaussian(1, 1, 1, 128)))
    # Columns 5 and 6 of the 7 have four symbols of base 9; field 4 is unused.
    streams["codeword_high.0"][0, 0, 0, 6] = 9**4
    with pytest.raises(InvalidPayload, match="unused field 4"):
        codec.check(streams, "x")
