"""Tests of the angle codec: directions compared with exact cosines, uniform angles, accuracy, layout, and edge cases."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpack.formats.angle import Angle
from kvpack.formats.errors import InvalidParameter, InvalidPayload, ValueTooLarge
from kvpack.formats.options import Options
from kvpack.formats.streams import DTYPE_BYTES
from support.strategies import CASES, CONTENTS, contents, create
from support.worked_examples import example, example_codec, example_streams

PAGE = Path(__file__).parents[2] / "spec" / "codecs" / "angle.md"
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
NORM_WORDS = ("fp32", *(f"{kind}{bits}" for kind in ("linear", "log") for bits in range(1, 9)))


def angle(dim: int = 128, **words: Any) -> Angle:
    options = {"n": 64, **words}
    return Angle.create(dim, "k", Options("angle", {name: str(value) for name, value in options.items()}))


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def row_bytes(codec: Angle) -> int:
    return sum(DTYPE_BYTES[entry.dtype] * int(numpy.prod(entry.shape)) for entry in codec.layout(1, 1, 1).values())


def arrays(streams: dict[str, torch.Tensor]) -> dict[str, numpy.ndarray[Any, Any]]:
    return {name: stream.numpy().copy() for name, stream in streams.items()}


def digits(codec: Angle, streams: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return bins and norm codes, int64 ``[batch, kv_head, token, dim / 2]``."""
    names = dict(codec.fields)
    if "symbol" in names:
        bins, codes = codec.unpack("symbol", streams)
        return bins.long(), codes.long()
    if "angle" in names:
        bins = codec.unpack("angle", streams)[0].long()
    else:
        low = codec.packings()["angle_low"].bases[0]
        bins = codec.unpack("angle_high", streams)[0].long() * low + codec.unpack("angle_low", streams)[0]
    return bins, codec.unpack("norm_codes", streams)[0].long() if "norm_codes" in names else None


def cosine(turn: Fraction) -> Fraction:
    """Return the cosine of 2 pi ``turn`` to within 2^-90, by summing its series exactly."""
    pi = Fraction(3141592653589793238462643383279502884197, 10**39)
    square = -((2 * pi * turn) ** 2)
    total, term = Fraction(0), Fraction(1)
    for n in range(1, 60):
        total += term
        term = round(term * square / (2 * n * (2 * n - 1)) * 2**120) / Fraction(2**120)
    return total


# Directions


@pytest.mark.parametrize("bins", [2, 3, 6, 7, 48, 100, 128])
def test_directions_are_correctly_rounded(bins: int) -> None:
    table = angle(n=bins).directions
    assert table.shape == (bins, 2)
    for k, (found_cosine, found_sine) in enumerate(table.tolist()):
        turn = Fraction(2 * k + 1, 2 * bins)
        for found, exact in ((found_cosine, cosine(turn)), (found_sine, cosine(turn - Fraction(1, 4)))):
            value = numpy.float32(found)
            if abs(exact) < 2.0**-60:
                assert found == 0
                continue
            gap = abs(Fraction(float(value)) - exact)
            for neighbor in (numpy.nextafter(value, numpy.float32(2)), numpy.nextafter(value, numpy.float32(-2))):
                assert gap <= abs(Fraction(float(neighbor)) - exact)


@pytest.mark.parametrize("bins", [1000, 16384, 65536])
def test_large_direction_tables_are_correct(bins: int) -> None:
    theta = (torch.arange(bins, dtype=torch.float64) + 0.5) * (2 * math.pi / bins)
    expected = torch.stack([theta.cos(), theta.sin()], 1)
    torch.testing.assert_close(angle(n=bins).directions.double(), expected, rtol=2.0**-24, atol=1e-14)


@settings(max_examples=25)
@given(st.one_of(st.integers(2, 300), st.sampled_from([1000, 4096, 65535, 65536])), st.integers(0, 2**32))
def test_bins_contain_their_angles(bins: int, seed: int) -> None:
    codec = angle(2, n=bins, norm="fp32", rotation="none")
    x = contents("mixed", (1, 1, 50, 2), seed)
    found, _ = digits(codec, codec.encode(x))
    turns = torch.atan2(x[..., 1].double(), x[..., 0].double()) / (2 * math.pi) * bins
    away = (turns - found[..., 0] - 0.5 + bins / 2).remainder(bins) - bins / 2
    assert (away.abs() <= 0.5 + bins * 2.0**-21).all()


def test_angles_on_the_axes_have_the_right_bins() -> None:
    codec = angle(2, n=8, norm="fp32", rotation="none")
    x = torch.tensor([[1, 0], [1, 1e-30], [0, 1], [-1, 0.0], [0, -1], [1, -1e-30], [1, -1], [0, 0]])[None, None]
    found, _ = digits(codec, codec.encode(x))
    assert found[0, 0, :, 0].tolist() == [0, 0, 2, 4, 6, 7, 7, 0]


def test_random_signs_spread_angles_evenly() -> None:
    """Only after a signed Hadamard rotation are the angles of correlated channels close to uniform (TurboAngle, Sec. 2)."""
    x = gaussian(1, 1, 500, 128)
    x[..., 1::2] += 2 * x[..., 0::2]
    x[..., 0::2] *= 5**0.5
    unevenness = {}
    for rotation in ("none", "hadamard", "signed-hadamard"):
        codecs = [angle(n=16, norm="fp32", rotation=rotation, seed=seed) for seed in range(16)]
        bins = [digits(codec, codec.encode(x))[0].flatten() for codec in codecs]
        count = torch.bincount(torch.cat(bins), minlength=16)
        unevenness[rotation] = (count / count.float().mean() - 1).abs().max().item()
    assert unevenness["signed-hadamard"] < 0.1
    assert min(unevenness["none"], unevenness["hadamard"]) > 0.5


# Accuracy and rate


def test_the_error_of_64_bins_matches_the_theory() -> None:
    x = gaussian(1, 1, 4000, 128)
    codec = angle(norm="fp32")
    error = (codec.decode(codec.encode(x)) - x).square().mean().item()
    # A quarter of what the lower edge of a bin gives, 0.00323; exactly 2 (1 - sinc) of half a bin.
    assert error == pytest.approx(0.00081, rel=0.02)
    assert error == pytest.approx(2 * (1 - math.sin(math.pi / 64) / (math.pi / 64)), rel=0.01)


@pytest.mark.parametrize(
    ("words", "bits", "nominal"),
    [
        ({"n": 128}, 7.75, 8.0),
        ({"n": 128, "range": "fp32"}, 8.0, 8.0),
        ({"n": 64, "norm": "log4"}, 5.25, 5.5),
        ({"n": 48, "norm": "log4"}, 5.125, math.log2(48) / 2 + 2.5),
        ({"n": 64, "norm": "fp32"}, 19.0, 19.0),
        ({"n": 128, "arrangement": "direct"}, 8.25, 8.0),
    ],
    ids=str,
)
def test_stored_bits_and_nominal_bits_match_the_paper(words: dict[str, Any], bits: float, nominal: float) -> None:
    codec = angle(**words)
    assert row_bytes(codec) * 8 / 128 == bits
    assert codec.nominal_bits == pytest.approx(nominal)


@pytest.mark.parametrize("range_dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("word", NORM_WORDS[1:])
def test_norm_codes_are_the_nearest_in_the_stored_range(word: str, range_dtype: str) -> None:
    codec = angle(norm=word, range=range_dtype, rotation="none", norm_rule="norm")
    x = gaussian(1, 2, 60, 128)
    streams = codec.encode(x)
    _, codes = digits(codec, streams)
    assert codes is not None
    step, minimum = streams["range"].double()[..., None].unbind(-2)
    norms = x.double().reshape(*x.shape[:-1], 64, 2).norm(dim=-1)
    if word.startswith("log"):
        norms = torch.maximum(norms, norms.amax(-1, keepdim=True) / 256).log2()
    highest = 2 ** int(word[-1]) - 1
    away = (norms - minimum - step * codes).abs()
    precision = 2.0**-11 if range_dtype == "fp16" else 2.0**-24
    ends = precision * (highest * step + minimum.abs() + 1)
    assert (away <= step / 2 + ends + 2.0**-20).all()
    assert codes.amax() == highest
    assert codes.amin() == 0


# Layout


@settings(max_examples=25)
@given(st.integers(1, 150), st.one_of(st.integers(2, 65536), st.sampled_from([48, 56, 64, 96, 128, 192, 256, 65536])))
def test_the_smallest_of_three_packings_is_used(pairs: int, bins: int) -> None:
    def fewest(base: int) -> int:
        sizes: list[int] = []
        for fields in range(1, min(pairs, 128) + 1):
            if base**fields > (2**128 if base & (base - 1) == 0 else 2**53):
                break
            width, column = -(-pairs // fields), -(-(base**fields - 1).bit_length() // 8)
            sizes.append(2 * (width * (column // 2) + -(-width // 2) * (column % 2)))
        return min(sizes)

    rounded = 2 ** (bins - 1).bit_length()
    low = next(2**k for k in range(20) if bins % 2 ** (k + 1))
    candidates = [(fewest(rounded), [(rounded, bins)])]
    if 1 < low < bins:
        candidates.append((fewest(low) + fewest(bins // low), [(low, low), (bins // low, bins // low)]))
    candidates.append((fewest(bins), [(bins, bins)]))
    size, expected = min(candidates, key=lambda candidate: candidate[0])
    codec = angle(2 * pairs, n=bins, rotation="none", norm="linear4")
    packings = dict(codec.packings())
    norm_codes = packings.pop("norm_codes")
    assert [(p.bases[0], p.alphabets[0]) for p in packings.values()] == expected
    assert list(packings) == (["angle"] if len(expected) == 1 else ["angle_low", "angle_high"])
    assert row_bytes(codec) == size + norm_codes.row_bytes + 4


@settings(max_examples=25)
@given(st.data())
def test_arbitrary_codes_decode_by_the_formula(data: st.DataObject) -> None:
    dim, bins = data.draw(st.sampled_from([2, 6, 64, 128])), data.draw(st.sampled_from([2, 3, 7, 48, 64, 100, 1000, 65536]))
    word = data.draw(st.sampled_from(NORM_WORDS))
    random = numpy.random.default_rng(data.draw(st.integers(0, 2**32)))
    shape = (1, 2, 3, dim // 2)
    k = torch.from_numpy(random.integers(0, bins, shape))
    code = torch.from_numpy(random.integers(0, 2 ** int(word[-1]) if word != "fp32" else 1, shape))
    # Small steps, for 2^128 is infinite.
    step, minimum = (torch.from_numpy(random.normal(scale=scale, size=(1, 2, 3))).half() for scale in (0.06, 3))
    norms = torch.from_numpy(random.normal(size=shape)).float()
    decoded = []
    for arrangement in ("dense", "direct") if word != "fp32" else ("dense",):
        codec = angle(dim, n=bins, norm=word, arrangement=arrangement, rotation="none")
        packings = codec.packings()
        streams = {"norm": norms} if word == "fp32" else {"range": torch.stack([step, minimum], -1)}
        for name, packing in packings.items():
            low = packings["angle_low"].bases[0] if "angle_low" in packings else 1
            values = {"symbol": [k, code], "angle": [k], "angle_low": [k % low], "angle_high": [k // low], "norm_codes": [code]}[name]
            streams |= dict(zip((f"{name}.{plane}" for plane in range(len(packing.planes))), packing.pack(values), strict=True))
        codec.check(arrays(streams), "x")
        decoded.append(codec.decode(streams))
    assert all(torch.equal(decoded[0], other) for other in decoded)
    exact = minimum.double()[..., None] + step.double()[..., None] * code
    magnitude = minimum.double().abs()[..., None] + step.double().abs()[..., None] * code
    if word == "fp32":
        exact, allowed = norms.double(), norms.double().abs() * 2.0**-22
    elif word.startswith("log"):
        exact = exact.exp2()
        allowed = exact * 2.0**-17
    else:
        allowed = magnitude * 2.0**-21
    theta = (k.double() + 0.5) * (2 * math.pi / bins)
    expected = torch.stack([exact * theta.cos(), exact * theta.sin()], -1).flatten(3)
    assert ((decoded[0].double() - expected).abs() <= allowed.repeat_interleave(2, -1) + 1e-14).all()


def test_the_worked_example_of_the_specification_is_reproduced() -> None:
    codec = example_codec(PAGE, Angle)
    assert isinstance(codec, Angle)
    streams = example_streams(PAGE, codec)
    codec.check(arrays(streams), "example")
    bins, codes = digits(codec, streams)
    assert codes is not None
    for token, row in enumerate(example(PAGE, "token", "step", "minimum", "bins", "norm codes")):
        assert streams["range"][0, 0, token].tolist() == [numpy.float32(row["step"]), numpy.float32(row["minimum"])]
        assert bins[0, 0, token].tolist() == [int(value) for value in row["bins"].split()]
        assert codes[0, 0, token].tolist() == [int(value) for value in row["norm codes"].split()]
    values = torch.tensor([[float(value) for value in row["values"].split()] for row in example(PAGE, "token", "values")])
    torch.testing.assert_close(codec.decode(streams)[0, 0], values, rtol=2.0**-17, atol=0)


# Inputs


def check_round_trip(codec: Angle, x: torch.Tensor) -> bool:
    """Check the layout, the parameters, and the error of one round trip. Return False if the input is refused as too large."""
    try:
        streams = codec.encode(x)
    except ValueTooLarge:
        assert x.abs().max() > 1000
        return False
    stored = {"U16": torch.uint16, "F16": torch.float16, "F32": torch.float32}
    layout = codec.layout(*x.shape[:3])
    assert {name: (stream.dtype, tuple(stream.shape)) for name, stream in streams.items()} == {
        name: (stored[entry.dtype], entry.shape) for name, entry in layout.items()
    }
    codec.check(arrays(streams), "x")
    params = codec.params()
    assert params.pop("id") == "angle"
    assert Angle.from_params(params) == codec
    decoded = codec.decode(streams)
    assert decoded.shape == x.shape
    error, norm = (decoded - x).double().norm(dim=-1), x.double().norm(dim=-1)
    # Two norm codes and four bins are the coarsest tried: never further away than three times the token's norm.
    assert (error <= 3 * norm + 2.0**-20).all()
    return True


@pytest.mark.parametrize("words", [{"norm": "fp32"}, {}, {"norm": "log4", "n": 48}, {"norm": "linear3", "arrangement": "direct"}], ids=str)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_head_dim_is_supported(dim: int, words: dict[str, Any]) -> None:
    for kind, tokens in (("outliers", 37), ("gaussian", 1), ("gaussian", 0)):
        assert check_round_trip(angle(dim, seed=3, **words), contents(kind, (1, 2, tokens, dim), seed=dim))


@pytest.mark.parametrize("norm", ["fp32", "linear8", "log4"])
@pytest.mark.parametrize("kind", CONTENTS)
def test_all_kinds_of_values_are_decoded_within_the_bound(kind: str, norm: str) -> None:
    for range_dtype in ("fp16", "fp32") if norm != "fp32" else ("fp16",):
        for rotation in ("none", "signed-hadamard"):
            accepted = check_round_trip(angle(40, norm=norm, rotation=rotation, range=range_dtype), contents(kind, (2, 3, 7, 40), seed=1))
            assert accepted or kind == "large"


@settings(max_examples=25)
@given(st.data())
def test_values_survive_a_round_trip_within_the_bound(data: st.DataObject) -> None:
    norm = data.draw(st.sampled_from(NORM_WORDS))
    words: dict[str, Any] = {"n": data.draw(st.integers(4, 1000)), "norm": norm}
    if norm != "fp32":
        words |= {"arrangement": data.draw(st.sampled_from(["dense", "direct"])), "range": data.draw(st.sampled_from(["fp16", "fp32"]))}
    dim = 2 * data.draw(st.integers(1, 70))
    x = contents(data.draw(st.sampled_from(CONTENTS)), (1, 2, data.draw(st.integers(0, 9)), dim), data.draw(st.integers(0, 2**32)))
    check_round_trip(angle(dim, rotation="none", **words), x)


@pytest.mark.parametrize("norm", ["linear1", "log1"])
def test_no_factor_makes_a_norm_infinite(norm: str) -> None:
    """If there are only two codes for all norms, the factor is large (rule angle-7)."""
    x = contents("large", (1, 2, 2, 102), 5665759)
    assert check_round_trip(angle(102, n=4, norm=norm, range="fp32", rotation="none"), x)


@pytest.mark.parametrize("seed", [31, 49])
def test_a_subnormal_step_keeps_the_value_used_to_choose_codes(seed: int) -> None:
    codec, x = create("angle", 128, n="2"), contents("mixed", (1, 2, 19, 128), seed)
    streams = codec.encode(x)
    CASES["angle"].check(codec, x, streams, codec.decode(streams))


@pytest.mark.parametrize("rotation", ["none", "signed-hadamard"])
@pytest.mark.parametrize("norm", NORM_WORDS)
def test_zero_tokens_decode_to_zero(norm: str, rotation: str) -> None:
    codec = angle(norm=norm, rotation=rotation)
    x = gaussian(1, 1, 3, 128)
    x[:, :, 1] = 0
    streams = codec.encode(x)
    assert torch.equal(codec.decode(streams)[:, :, 1], torch.zeros(1, 1, 128))
    if norm.startswith("log"):
        assert streams["range"][0, 0, 1].tolist() == [0, -65504]


def test_a_zero_pair_does_not_widen_a_logarithmic_range() -> None:
    codec = angle(norm="log4", rotation="none", norm_rule="norm")
    x = gaussian(1, 1, 1, 128)
    x[..., :2] = 0
    step, minimum = codec.encode(x)["range"][0, 0, 0].float().tolist()
    largest = math.log2(x.reshape(*x.shape[:-1], 64, 2).norm(dim=-1).max())
    assert minimum == pytest.approx(largest - 8, abs=0.01)
    assert minimum + 15 * step == pytest.approx(largest, abs=0.01)


def test_huge_norms_are_refused_but_fit_in_fp32() -> None:
    x = gaussian(1, 2, 5, 128)
    x[0, 1, 3] *= 1e9
    with pytest.raises(ValueTooLarge, match=r"the step or minimum of a token's norms .* at \[0, 1, 3, \d\] is .*float16 value is 65504"):
        angle().encode(x)
    others: list[dict[str, Any]] = [{"range": "fp32"}, {"norm": "log8"}, {"norm": "fp32"}]
    for words in others:
        codec = angle(n=256, **words)
        assert (codec.decode(codec.encode(x)) - x)[0, 1, 3].norm() < 0.03 * x[0, 1, 3].norm()
    with pytest.raises(ValueTooLarge, match=r"norm of a pair of channels \(token 0 or later\) at \[0, 0, 0, 0\].*float32"):
        angle(norm="fp32", rotation="none").encode(torch.full((1, 1, 1, 128), 3e38))


def test_block_size_does_not_change_results(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, x = angle(rotation="none"), gaussian(2, 3, 41, 128)
    expected = codec.encode(x)
    monkeypatch.setattr("kvpack.formats.angle._HEAD_TOKENS_PER_BLOCK", 24)
    found = codec.encode(x)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Refusals


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"n": 1}, "2 to 65536"),
        ({"n": 65537}, "2 to 65536"),
        ({"dim": 127}, "dim is 127, expected an even number"),
        ({"dim": 0}, "2 to 1024"),
        ({"dim": 66}, "no Hadamard rotation for 66 channels"),
        ({"norm": "linear9"}, "expected one of fp32, linear1"),
        ({"norm": "log"}, "expected one of fp32, linear1"),
        ({"norm": "fp32", "arrangement": "direct"}, "arrangement is 'direct', expected one of dense"),
        ({"norm": "fp32", "range": "fp32"}, "range is 'fp32', expected one of fp16"),
        ({"b": 3}, "no option 'b'"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        angle(**words)


def test_the_number_of_bins_is_required() -> None:
    with pytest.raises(InvalidParameter, match="needs n="):
        Angle.create(128, "k", Options("angle", {}))


@pytest.mark.parametrize(
    "change",
    [
        {"bins": 1},
        {"dim": 130},
        {"dim": 1026},
        {"norm": "fp32"},
        {"norm": "linear4"},
        {"norm_bits": 0},
        {"norm_bits": 9},
        {"range": "F16"},
        {"arrangement": "direct"},
        {"seed": 2**64},
        {"rotation_kind": "givens"},
        {"fields": ()},
        {"fields": (("angle", 4),)},
        {"fields": (("norm_codes", 2), ("angle", 4))},
        {"fields": (("angle", 0), ("norm_codes", 2))},
        {"bins": 48},
    ],
    ids=str,
)
def test_invalid_headers_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        replace(angle(), **change)


def test_other_numbers_of_fields_are_read() -> None:
    assert check_round_trip(replace(angle(), fields=(("angle", 1), ("norm_codes", 16))), gaussian(1, 2, 5, 128))
    assert check_round_trip(replace(angle(n=48), fields=(("angle_low", 1), ("angle_high", 3), ("norm_codes", 1))), gaussian(1, 2, 5, 128))


@pytest.mark.parametrize(
    ("words", "stream", "word", "message"),
    [
        ({"n": 100}, "angle.0", 100, "symbol of field 0 at .* is 100, expected at most 99"),
        ({"n": 48, "norm": "linear3", "arrangement": "direct"}, "symbol.0", 48, "symbol of field 0 at .* is 48, expected at most 47"),
        ({"n": 48, "norm": "linear3", "arrangement": "direct"}, "symbol.0", 1 << 9, "spare bits"),
        ({"n": 48}, "angle_high.0", 3**10, "column at .* is 59049, expected at most 59048"),
        ({}, "range", 0x7C00, "the value at .* is inf"),
        ({"norm": "fp32"}, "norm", 0x7FC00000, "the value at .* is nan"),
    ],
    ids=["bin", "bin of a symbol", "spare bit", "column", "infinity", "NaN"],
)
def test_streams_that_no_writer_may_produce_are_refused(words: dict[str, Any], stream: str, word: int, message: str) -> None:
    codec = angle(**words)
    streams = arrays(codec.encode(gaussian(1, 2, 3, 128)))
    codec.check(streams, "x")
    array = streams[stream]
    array.view(f"u{array.itemsize}").flat[0] = word
    with pytest.raises(InvalidPayload, match=message):
        codec.check(streams, "x")
