"""Tests of minifloat: rounding, published scales, exact decoding, joining of runs, and refusals."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack.formats.errors import InvalidParameter, InvalidPayload, ValueTooLarge
from kvpack.formats.minifloat import ELEMENTS, Minifloat, block_exponents, element_values, encode_elements, encode_portably
from support.minifloat_digits import block_scales, make_finite
from support.strategies import check_round_trip, codecs, contents, create, tensors

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
WORDS: dict[str, dict[str, str]] = {
    "fp8": {"element": "e4m3"},
    "fp8 per head": {"element": "e5m2", "per": "head", "scales": "fp16"},
    "fp8 per token": {"element": "e4m3", "per": "token", "scales": "fp16"},
    "4 bits per token": {"element": "e2m1", "per": "token"},
    "mxfp8": {"element": "e4m3", "scales": "e8m0"},
    "mxfp8 e5m2": {"element": "e5m2", "scales": "e8m0"},
    "mxfp4": {"element": "e2m1", "scales": "e8m0"},
    "nvfp4": {"element": "e2m1", "scales": "e4m3"},
}


def minifloat(dim: int = 64, **words: Any) -> Minifloat:
    codec = create("minifloat", dim, **words)
    assert isinstance(codec, Minifloat)
    return codec


@settings(max_examples=40)
@given(st.data())
def test_values_survive_a_round_trip_within_the_bound(data: st.DataObject) -> None:
    codec = data.draw(codecs("minifloat"))
    check_round_trip(codec, data.draw(tensors(codec.dim)))


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("kind", ["gaussian", "outliers", "mixed", "constant", "zero", "denormal", "large"])
def test_every_format_supports_all_kinds_of_values(kind: str, words: dict[str, str]) -> None:
    for dim, tokens in ((1, 3), (40, 37), (128, 1), (128, 0)):
        codec = minifloat(dim, **words)
        assert check_round_trip(codec, contents(kind, (2, 2, tokens, dim), seed=dim)) or codec.scale_dtype == "fp16"


@pytest.mark.parametrize("element", DTYPES)
def test_elements_equal_those_of_torch(element: str) -> None:
    """The test covers every code, and rounds random values, midpoints between elements, and both neighbors of each midpoint."""
    every = torch.arange(256, dtype=torch.uint8)
    expected = every.view(DTYPES[element]).to(torch.float32)
    held = torch.isfinite(expected)
    assert held[: ELEMENTS[element].finite].all()
    assert not held[ELEMENTS[element].finite : 128].any()
    assert torch.equal(element_values(element, "cpu")[held].view(torch.int32), expected[held].view(torch.int32))
    values = expected[held].unique()
    middles = (values[1:] + values[:-1]) / 2
    near = [torch.nextafter(middles, torch.tensor(end)) for end in (float("inf"), -float("inf"))]
    random = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * 2.0 ** torch.arange(-24, 16).repeat(2500)
    x = torch.cat([values, middles, *near, random, torch.tensor([0.0, -0.0, 3e38, -3e38])])
    largest = ELEMENTS[element].largest
    nearest = x.clamp(-largest, largest).to(DTYPES[element]).view(torch.uint8)
    assert torch.equal(encode_elements(x, element), nearest)
    assert torch.equal(encode_portably(x, element).to(torch.uint8), nearest)


def test_four_bit_elements_match_the_published_values() -> None:
    """Elements have the values in OCP MX, table 5, and ties are rounded to the even code."""
    assert element_values("e2m1", "cpu").tolist() == [sign * value for sign in (1.0, -1.0) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.5, 100.0, 0.26, -0.25, -0.26, -2.6, 0.0])
    assert encode_elements(x, "e2m1").tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 1, 8, 9, 13, 0]
    every = torch.cat([torch.linspace(-7, 7, 100_001), torch.tensor([-0.0, 2.0**-149, 3e38, -3e38])])
    assert torch.equal(encode_elements(every, "e2m1").to(torch.int32), encode_portably(every, "e2m1"))


def test_scales_match_the_published_ones() -> None:
    """Expected scales are computed by hand from OCP MX, Sec. 6.3, doubled for values that it clips, and from NVIDIA's NVFP4."""
    x = torch.zeros(1, 1, 1, 64)
    x[..., 0], x[..., 33], x[..., 40] = 500.0, -0.75, 0.1
    mxfp8 = minifloat(64, scales="e8m0").encode(x)
    assert mxfp8["block_scales"].flatten().tolist() == [127 + 8 - 8 + 1, 127 - 1 - 8]
    mxfp4 = minifloat(64, element="e2m1", scales="e8m0")
    assert mxfp4.encode(x)["block_scales"].flatten().tolist() == [127 + 8 - 2 + 1, 127 - 1 - 2]
    # 500 / 2^6 is 7.8, and would be cut to 6, so the scale is 2^7; 0.75 / 2^-3 is 6; 0.1 / 2^-3 is 0.8.
    assert mxfp4.decode(mxfp4.encode(x)).flatten()[[0, 33, 40]].tolist() == [512.0, -0.75, 0.125]
    nvfp4 = minifloat(64, element="e2m1", scales="e4m3").encode(x)
    unit = torch.tensor(500.0) / (6 * 448)
    assert nvfp4["global_scale"].flatten().tolist() == [unit.item()]
    expected = (torch.tensor([500.0, 0.0, 0.75, 0.0]) / 6 / unit).to(torch.float8_e4m3fn)
    assert torch.equal(nvfp4["block_scales"].flatten(), expected.view(torch.uint8))
    fp8 = minifloat(64, per="tensor").encode(x)
    assert fp8["scale"].flatten().tolist() == [(torch.tensor(500.0) / 448).item()]


def test_block_exponents_cover_every_finite_number() -> None:
    bits = torch.arange(0, 0x7F800000, 12345, dtype=torch.int32)
    values = bits.view(torch.float32)
    for element, limit in (("e4m3", 464), ("e5m2", 61440), ("e2m1", 7)):
        fraction, exponent = torch.frexp(values.double() / limit)
        expected = (exponent - (fraction == 0.5).to(torch.int32) + 127).clamp_min(0)
        assert torch.equal(block_exponents(values, element)[1:], expected[1:].to(torch.int32))
        assert block_exponents(values, element)[0] == 0


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_no_value_of_a_block_is_clipped_to_the_largest_element(element: str) -> None:
    """Every value is rounded to the nearest element, so tokens of any magnitude have the same relative precision."""
    x = (1 + torch.arange(4096) / 4096)[None, None, :, None].expand(1, 1, 4096, 32) * torch.tensor([1.0, -1.0]).repeat(16)
    codec = minifloat(32, element=element, scales="e8m0")
    streams = codec.encode(x)
    decoded = codec.decode(streams)
    assert ((decoded - x).abs() <= 2.0 ** -(ELEMENTS[element].fraction_bits + 1) * x.abs()).all()
    again = codec.encode(decoded)
    assert all(torch.equal(again[name], streams[name]) for name in streams), "encoding decoded values gave different bits"


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_decoding_is_exact_for_any_valid_streams(words: dict[str, str]) -> None:
    """Any finite elements and scales are decoded, and compared with binary64 products that are rounded once."""
    codec = minifloat(80, **words)
    generator = torch.Generator().manual_seed(3)
    codes = make_finite(codec, torch.randint(0, 1 << codec.format.bits, (2, 3, 45, 80), generator=generator))
    streams, factor = codec.pack("codes", codes), torch.ones(2, 1, 1, 1, dtype=torch.float64)
    for name, layout in codec.scale_layouts(2, 3, 45).items():
        if name == "block_scales":
            streams[name] = block_scales(codec, torch.randint(0, 256, layout.shape, generator=generator), 252).to(torch.uint8)
            scales = streams[name].double() - 127
            powers = torch.exp2(scales) if codec.scale_dtype == "e8m0" else streams[name].view(torch.float8_e4m3fn).double()
            factor = factor * powers.repeat_interleave(codec.block_size, -1)[..., :80]
        else:
            scale = torch.exp(3 * torch.randn(layout.shape, generator=generator))
            streams[name] = scale.to(torch.float16 if layout.dtype == "F16" else torch.float32)
            factor = factor * streams[name].double()[..., None]
    values = torch.tensor([codec.format.value(code) for code in codes.flatten().tolist()], dtype=torch.float64).view(codes.shape)
    expected = (values * factor).to(torch.float32)
    assert torch.equal(codec.decode(streams).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize(
    ("name", "bits"), [("fp8", 8.0), ("fp8 per token", 8.125), ("mxfp8", 8.25), ("mxfp4", 4.25), ("nvfp4", 4.5)], ids=lambda case: str(case)
)
def test_formats_have_the_expected_bits_per_value(name: str, bits: float) -> None:
    codec = minifloat(128, **WORDS[name])
    sizes = {"U8": 8, "U16": 16, "F16": 16, "F32": 32}
    rows = [entry for entry in codec.layout(1, 1, 10).values() if entry.per == "token"]
    assert sum(sizes[entry.dtype] * int(numpy.prod(entry.shape)) for entry in rows) == bits * 1280


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "kv=minifloat:element=e5m2,per=head"])
def test_appended_runs_keep_a_suitable_scale(recipe: str) -> None:
    x = torch.randn(1, 2, 32, 64, generator=torch.Generator().manual_seed(0)).clamp(-2, 2)
    x[..., 0, :] = 2.0
    cache = kvpack.pack([(x, x)], recipe)
    for factor in (1.0, 0.5, 0.1):
        cache = cache.append([(factor * x, x)])
    assert len(cache[0].k.merged().runs) == 1
    larger = cache.append([(8 * x, x)])
    assert len(larger[0].k.merged().runs) == 2
    # A scale that was too small is left with room to grow.
    assert len(larger.append([(12 * x, x)])[0].k.merged().runs) == 2
    smaller = cache.append([(x / 100, x)])
    assert len(smaller[0].k.merged().runs) == 2
    decoded = smaller.unpack(torch.float32)[0][0][:, :, -32:]
    assert ((decoded - x / 100).norm() / (x / 100).norm()) < 0.15


def test_selected_sequences_keep_their_values() -> None:
    x = torch.randn(3, 2, 8, 64, generator=torch.Generator().manual_seed(0))
    for recipe in ("fp8", "nvfp4", "mxfp4"):
        cache = kvpack.pack([(x, x)], recipe)
        assert torch.equal(cache.select([2, 0]).unpack()[0][0], cache.unpack()[0][0][[2, 0]])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"scales": "e8m0", "per": "token"}, "scales=e8m0 and per=token cannot be combined: "),
        ({"per": "block"}, "scales=fp32 and per=block cannot be combined: "),
        ({"scales": "e4m3"}, r"scale_dtype e4m3 \(nvfp4\) needs element e2m1, but element is e4m3"),
        ({"element": "e3m2"}, "element is 'e3m2', expected one of e4m3, e5m2, e2m1"),
        ({"rotation": "hadamard"}, "has no option 'rotation'"),
    ],
    ids=str,
)
def test_incompatible_options_are_refused(words: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        minifloat(64, **words)


@pytest.mark.parametrize(
    ("words", "stream", "value", "message"),
    [
        ({"element": "e4m3"}, "codes.0", 0xFF3F, r"x.codes.0: the e4m3 in bits 8 to 15 .* at \[0, 0, 1, 2\] is 0xff, which is NaN"),
        ({"element": "e5m2"}, "codes.0", 0x007C, r"the e5m2 in bits 0 to 7 of the word at \[0, 0, 1, 2\] is 0x7c, which is infinity"),
        ({"element": "e5m2"}, "codes.0", 0xFE00, r"the e5m2 in bits 8 to 15 .* is 0xfe, which is NaN"),
        ({"scales": "e8m0"}, "block_scales", 0xFF, r"x.block_scales: the e8m0 at \[0, 0, 1, 1\] is 0xff, which is NaN; block scales"),
        ({"element": "e2m1", "scales": "e4m3"}, "block_scales", 0x7F, r"the e4m3 at .* is 0x7f, which is NaN; block scales"),
        ({"element": "e2m1", "scales": "e4m3"}, "block_scales", 0x81, r"is 0x81, which is a scale below zero"),
    ],
    ids=lambda case: str(case)[:30],
)
def test_non_finite_elements_and_scales_are_refused_by_name(words: dict[str, str], stream: str, value: int, message: str) -> None:
    codec = minifloat(64, **words)
    arrays = {name: tensor.numpy() for name, tensor in codec.encode(torch.ones(1, 1, 2, 64)).items()}
    codec.check(arrays, "x")
    arrays[stream][0, 0, 1, 2 if stream == "codes.0" else 1] = value
    with pytest.raises(InvalidPayload, match=message):
        codec.check(arrays, "x")


def test_an_unsuitable_scale_is_refused() -> None:
    with pytest.raises(ValueTooLarge, match=r"scale at .* the largest float16 value is 65504"):
        minifloat(8, scales="fp16").encode(torch.full((1, 1, 1, 8), 3e38))
