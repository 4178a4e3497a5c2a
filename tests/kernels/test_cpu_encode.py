"""Tests of encoding by the C kernels.

They produce the bytes of formats/, except where rotations and norms are rounded in another order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import kvpack
from kvpack.coding import dispatch
from kvpack.formats.errors import InvalidParameter, KvpackError, ValueTooLarge
from kvpack.formats.lloyd_max import direction_table
from kvpack.formats.norm_rule import relative_errors
from kvpack.formats.octahedral_search import codebook_directions
from kvpack.formats.runs import Run
from kvpack.formats.token_norms import norms_per_head
from kvpack.kernels.cpu import encode as cpu_encode
from kvpack.kernels.cpu import library
from kvpack.kernels.cpu.library import THREADS
from support.sidecar_recipes import RECIPES, relative_error
from support.strategies import CASES, CONTENTS, DIMS, contents, create, with_poisoned_padding

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

pytestmark = pytest.mark.skipif(not dispatch.c_is_built(), reason="the C kernels were not built")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

LEVELS = pytest.mark.parametrize("level", range(len(library.levels())), ids=library.levels())

ROUNDED_OTHERWISE = 2e-3
"""Largest share of words, and of binary16 norms, that may differ because a value is next to a rounding boundary."""

CLOSE = [
    ("scalar", 128, "b=3"),
    ("scalar", 80, "b=1"),
    ("scalar", 96, "b=4,norm=fp32"),
    ("scalar", 64, "b=8,rotation=none"),
    ("scalar", 256, "b=2,high=3,share=32"),
    ("scalar", 80, "b=5,high=8"),
    ("scalar", 128, "b=2,norm_rule=norm"),
    ("scalar", 64, "b=3,rounding=scaled"),
    ("scalar", 112, "b=8,rounding=scaled"),
    ("scalar", 80, "b=2,high=4,norm=log8,rounding=scaled"),
    ("scalar", 128, "b=4,rounding=scaled"),
    ("trellis", 128, "b=2"),
    ("trellis", 64, "b=1,states=256,norm=fp32"),
    ("trellis", 80, "b=3,states=256,norm_rule=norm"),
    ("trellis", 64, "b=4,rotation=none"),
    ("octahedral", 128, "b=2"),
    ("octahedral", 128, "b=3"),
    ("octahedral", 128, "b=4"),
    ("octahedral", 80, "b=3,arrangement=direct"),
    ("octahedral", 96, "b=4,arrangement=direct,norm=fp32"),
    ("octahedral", 64, "b=2,arrangement=direct"),
    ("octahedral", 256, "b=3,rounding=local2x2"),
    ("octahedral", 112, "b=3,rounding=full"),
    ("octahedral", 100, "b=6,rotation=none"),
    ("octahedral", 64, "b=7"),
    ("octahedral", 64, "b=7,rounding=scalar"),
    ("octahedral", 64, "b_dir=1,b_norm=0"),
    ("octahedral", 64, "b_dir=2,b_norm=8,arrangement=direct"),
    ("octahedral", 64, "b_dir=5,b_norm=0,rounding=scalar"),
    ("octahedral", 128, "b=3,norm_rule=norm"),
    ("angle", 128, "n=128"),
    ("angle", 80, "n=128,norm=linear8,arrangement=direct"),
    ("angle", 96, "n=48,norm=log4"),
    ("angle", 64, "n=1000,norm=fp32"),
    ("angle", 256, "n=65536,norm=log1,range=fp32"),
    ("angle", 10, "n=3,rotation=none"),
    ("angle", 64, "n=8,norm=log3,norm_rule=norm"),
    ("polar", 128, "b=3"),
    ("polar", 80, "b=2,norm=fp32"),
    ("polar", 64, "b=4.2.1"),
    ("polar", 96, "b=8"),
    ("polar", 50, "b=3.5,rotation=none"),
    ("polar", 256, "b=4,norm_rule=norm"),
    ("quaternion", 128, "s=24,r=3"),
    ("quaternion", 80, "s=9,r=4,arrangement=direct"),
    ("quaternion", 64, "s=12,r=6,norm=fp32"),
    ("quaternion", 96, "s=7,r=8,rotation=hadamard"),
    ("quaternion", 256, "s=1,r=1"),
    ("quaternion", 10, "s=24,r=2"),
    ("quaternion", 64, "s=12,r=3,norm_rule=norm"),
]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv(THREADS, raising=False)


@LEVELS
@given(data=st.data())
def test_tokens_of_any_strides_are_measured_as_in_formats(level: int, data: st.DataObject) -> None:
    batch, heads, tokens, dim = (data.draw(st.integers(1, most)) for most in (2, 3, 40, 140))
    dtype, layout = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(("heads", "tokens", "padded", "every second")))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x = torch.randn(batch, heads, 2 * tokens, dim + 8, generator=generator).mul_(2.0 ** data.draw(st.integers(-20, 12))).to(dtype)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if layout == "tokens" else x
    x = x[:, :, :: 2 if layout == "every second" else 1, :dim][:, :, :tokens]
    x = x.contiguous() if layout == "heads" else x
    value = data.draw(st.sampled_from((None, 0.0, -60000.0, float("inf"), float("nan"))))
    if value is not None:
        x[-1, 0, tokens // 2, data.draw(st.integers(0, dim - 1))] = value
    result = cpu_encode.measure_sizes(x, level=level)
    assert result is not None
    torch.testing.assert_close(result[0], norms_per_head(x), rtol=1e-5, atol=1e-30, equal_nan=True)
    torch.testing.assert_close(result[1], x.abs().amax(3).to(torch.float32), rtol=0, atol=0, equal_nan=True)


@given(data=st.data())
def test_groups_are_encoded_to_the_same_bytes_as_in_formats(data: st.DataObject) -> None:
    words = {
        "b": str(data.draw(st.integers(1, 8))),
        "g": data.draw(st.sampled_from(("4", "8", "16", "32", "64", "128"))),
        "axis": data.draw(st.sampled_from(("token", "channel"))),
        "centre": data.draw(st.sampled_from(("middle", "zero"))),
    }
    codec = create("group", data.draw(st.sampled_from(DIMS)), **words)
    shape = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(0, 600)), codec.dim)
    x = contents(data.draw(st.sampled_from([kind for kind in CONTENTS if kind != "large"])), shape, data.draw(st.integers(0, 99)))
    x = with_poisoned_padding(x.to(data.draw(st.sampled_from(DTYPES))))
    if not cpu_encode.supports(codec):
        packing = codec.packings()["codes"]
        assert packing.symbols % packing.width or packing.column_bytes > 4
        return
    try:
        expected = codec.encode(x.float())
    except ValueTooLarge:
        expected = None
    for level in range(len(library.levels())):
        found = cpu_encode.encode(codec, x, threads=data.draw(st.integers(1, 3)), level=level)
        if expected is None:
            assert found is None
            continue
        assert found is not None
        assert list(found) == list(expected)
        for name, stream in expected.items():
            # Of a group of zeros of both signs, a center may have either.
            assert torch.equal(*(each.view(torch.int16) if each.dtype == torch.uint16 else each for each in (found[name], stream)))


def bits(stream: torch.Tensor) -> torch.Tensor:
    return stream.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[stream.element_size()])


MINIFLOATS = [
    "element=e4m3",
    "element=e5m2,per=head,scales=fp16",
    "element=e2m1,per=tensor",
    "element=e4m3,scales=e8m0",
    "element=e5m2,scales=e8m0",
    "element=e2m1,scales=e8m0",
    "element=e2m1,scales=e4m3",
]


@pytest.mark.parametrize("words", MINIFLOATS)
@given(data=st.data())
@settings(max_examples=15)
def test_minifloats_are_encoded_to_the_same_bytes_as_in_formats(words: str, data: st.DataObject) -> None:
    codec = create("minifloat", data.draw(st.sampled_from((64, 128, 192))), **dict(word.split("=") for word in words.split(",")))
    shape = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 600)), codec.dim)
    x = contents(data.draw(st.sampled_from(CONTENTS)), shape, data.draw(st.integers(0, 99)))
    x = with_poisoned_padding(x.to(data.draw(st.sampled_from(DTYPES))))
    if not torch.isfinite(x).all():
        reject()
    assert cpu_encode.supports(codec)
    before = None
    if codec.run_scale is not None and data.draw(st.booleans()):  # type: ignore[attr-defined]
        try:
            before = codec.encode(x.float() * data.draw(st.sampled_from((0.0, 0.5, 1.0, 9.0, 40.0))))
        except ValueTooLarge:
            reject()
    try:
        run = codec.begin(Run(shape, x.device, lambda: iter([x.float()])), before)
        expected = {**run.encode(x.float(), 0), **run.streams}
    except ValueTooLarge:
        expected = None
    for level in range(len(library.levels())):
        found = cpu_encode.encode(codec, x, before, data.draw(st.integers(1, 3)), level)
        if expected is None:
            assert found is None
            continue
        assert found is not None
        assert found.keys() == expected.keys()
        for name, stream in expected.items():
            assert torch.equal(bits(found[name]), bits(stream)), name


@LEVELS
@pytest.mark.parametrize("words", MINIFLOATS)
def test_minifloats_of_all_magnitudes_are_encoded_as_in_formats(words: str, level: int) -> None:
    """Runs and blocks of bf16 whose largest value is anywhere, next to values of a few binades or of all."""
    codec = create("minifloat", 128, **dict(word.split("=") for word in words.split(",")))
    generator = torch.Generator().manual_seed(0)
    compared = 0
    for largest in (0, 1, 0x7F, 0x80, 0x1234, *range(0x3F00, 0x4000, 15), 0x7F00, 0x7F7F):
        for span in (0x300, 0x1000, 0x7F7F):
            words_below = largest - torch.randint(0, min(largest, span) + 1, (8, 128), generator=generator)
            words_below[0, 0] = largest
            signs = torch.randint(0, 2, (8, 128), generator=generator) << 15
            x = (words_below | signs).to(torch.int16).view(torch.bfloat16).view(1, 1, 8, 128)
            if (found := cpu_encode.encode(codec, x, level=level)) is None:
                continue
            compared += 1
            for name, stream in codec.encode(x.float()).items():
                assert torch.equal(bits(found[name]), bits(stream)), (name, largest, span)
    assert compared > 50


@LEVELS
@pytest.mark.parametrize("dim", [64, 128])
def test_values_halfway_between_elements_of_a_block_are_rounded_as_in_formats(dim: int, level: int) -> None:
    codec, generator = create("minifloat", dim, element="e2m1", scales="e4m3"), torch.Generator().manual_seed(dim)
    largest = torch.exp2(torch.rand(1, 1, 400, dim // 16, 1, generator=generator) * 12 - 6).to(torch.bfloat16).to(torch.float32)
    run_scale = largest.amax() / 6 / 448
    scale = (largest / 6 / run_scale).to(torch.float8_e4m3fn).to(torch.float32) * run_scale
    halfway = (scale * torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2 + [0.0])).to(torch.bfloat16)
    near = halfway.view(torch.int16) + torch.randint(-1, 2, halfway.shape, generator=generator).to(torch.int16).mul_(halfway > 0)
    values = near.view(torch.bfloat16).to(torch.float32).minimum(largest)
    signs = torch.randint(0, 2, (1, 1, 400, dim), generator=generator) * 2 - 1
    x = (torch.cat([largest, values], 4).view(1, 1, 400, dim) * signs).to(torch.bfloat16)
    found = cpu_encode.encode(codec, x, level=level)
    assert found is not None
    for name, stream in codec.encode(x.to(torch.float32)).items():
        assert torch.equal(bits(found[name]), bits(stream)), name


@LEVELS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", MINIFLOATS)
def test_skipped_tokens_of_a_minifloat_are_encoded_as_zeros(words: str, dtype: torch.dtype, level: int) -> None:
    codec = create("minifloat", 128, **dict(word.split("=") for word in words.split(",")))
    x = contents("gaussian", (2, 3, 70, 128), 0).to(dtype)
    skipped = torch.rand(2, 70, generator=torch.Generator().manual_seed(1)) < 0.2
    zeros = x.masked_fill(skipped[:, None, :, None], 0.0)
    for value in (1e3, torch.inf, torch.nan):
        found = cpu_encode.encode(codec, torch.where(skipped[:, None, :, None], value, x), level=level, skipped=skipped)
        expected = cpu_encode.encode(codec, zeros, level=level)
        assert found is not None
        assert expected is not None
        for name, stream in expected.items():
            assert torch.equal(bits(found[name]), bits(stream)), name


@LEVELS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", ["element=e4m3", "element=e4m3,scales=e8m0", "element=e2m1,scales=e4m3"])
def test_nan_in_minifloat_input_is_found_anywhere(words: str, dtype: torch.dtype, level: int) -> None:
    codec = create("minifloat", 64, **dict(word.split("=") for word in words.split(",")))
    x = contents("gaussian", (1, 1, 40, 64), 0).to(dtype)
    assert cpu_encode.encode(codec, x, level=level) is not None
    for place in range(0, x.numel(), 37):
        for value in (torch.nan, torch.inf, -torch.inf):
            worse = x.flatten().clone()
            worse[place] = value
            assert cpu_encode.encode(codec, worse.view(x.shape), level=level) is None


@LEVELS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "words",
    [
        "scalar:b=2,mean=128,mean_bits=4",
        "octahedral:b=3,mean=16,channel_scale=fp32",
        "scalar:b=4,mean=64,norm=log8,channel_scale=fp16",
        "angle:n=64,mean=1024",
    ],
)
def test_means_and_channel_scales_equal_those_of_formats(words: str, dtype: torch.dtype, level: int) -> None:
    codec = kvpack.Recipe(f"k={words};v=raw;raw=0").codec(0, 1, "k", 64)
    x = contents("gaussian", (2, 2, 300, 64), 3) + 4 * contents("gaussian", (2, 2, 1, 64), 4)
    x[..., ::9] *= 20
    x[1, 0, 130:] = 0
    x = with_poisoned_padding(x.to(dtype))
    assert cpu_encode.supports(codec)
    found, expected = cpu_encode.encode(codec, x, level=level), codec.encode(x.float())
    assert found is not None
    assert list(found) == [*codec.row_layouts]
    codec.check({name: stream.numpy() for name, stream in found.items()}, "x")
    for name in codec.sidecar_layout(1, 1, 0):
        assert torch.equal(bits(found[name]), bits(expected[name])), name
    if "channel_scale" in words:
        assert (expected["channel_scale"] > 1).any()
        rest = cpu_encode.encode(codec, x, found, level=level)
        assert rest is not None
        assert all(torch.equal(bits(rest[name]), bits(found[name])) for name in found)
    for name in expected:
        if expected[name].dtype == torch.uint16:
            assert float((bits(found[name]) == bits(expected[name])).float().mean()) >= 1 - ROUNDED_OTHERWISE, name
    assert squared_error(codec, x, found) == pytest.approx(squared_error(codec, x, expected), rel=1e-4)


def test_means_of_other_pages_and_sidecars_are_left_to_formats() -> None:
    x = contents("gaussian", (1, 2, 40, 64), 0)
    for words in ("scalar:b=2,mean=8", "scalar:b=2,mean=16,outliers=3", "scalar:b=2,outliers=3", "scalar:b=2,channel_scale=fp16"):
        assert not cpu_encode.supports(kvpack.Recipe(f"k={words};v=raw;raw=0").codec(0, 1, "k", 64))
    assert cpu_encode.encode(kvpack.Recipe("k=scalar:b=2,mean=16;v=raw;raw=0").codec(0, 1, "k", 64), x * torch.nan) is None


def squared_error(codec: Codec, x: torch.Tensor, streams: dict[str, torch.Tensor]) -> float:
    return float((codec.decode(streams) - x.float()).double().square().sum())


def at_45_degrees(x: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Return a mask ``[batch, kv_head, token]`` of the tokens that are at about 45 degrees to their decoded values.

    For these, rounding decides whether norm_rule=unbiased enlarges the norm.
    """
    product, squares = (x.double() * decoded.double()).sum(-1), x.double().square().sum(-1) * decoded.double().square().sum(-1)
    return (2 * product.square() - squares).abs() <= 1e-3 * squares


def test_codecs_that_differ_only_in_their_search_share_no_table() -> None:
    """The kind of search is not stored in files, so the codecs compare equal."""
    x = contents("gaussian", (1, 1, 300, 64), 0)
    for rounding in ("scalar", "local3x3", "full", "local2x2"):
        codec = create("octahedral", 64, b="3", rounding=rounding)
        found = cpu_encode.encode(codec, x)
        assert found is not None
        assert squared_error(codec, x, found) == pytest.approx(squared_error(codec, x, codec.encode(x)), rel=1e-4)


@pytest.mark.parametrize("levels", [4, 8])
def test_a_line_finds_the_levels_around_the_nearest_direction(levels: int) -> None:
    """At the start of a step on the line, the nearest direction has the level that it shares with the previous step.

    This suffices, because the directions nearest to a codeword form a connected region, and the codeword lies within its own steps.
    """
    table = direction_table(levels)
    slope, offset = cpu_encode.fit_line(torch.frombuffer(bytearray(table), dtype=torch.float32))
    eta = torch.linspace(0, 1, 1025, dtype=torch.float64)
    directions = codebook_directions(table).double()
    # What the estimate of a reciprocal and the coordinate's own rounding move.
    for moved in (-0.02, 0.0, 0.02):
        for level in range(1, levels - 1):
            xi = torch.full_like(eta, (level + moved - offset) / slope)
            z = 1 - xi - eta
            found = (torch.stack([torch.where(z < 0, 1 - eta, xi), torch.where(z < 0, 1 - xi, eta), z], -1) @ directions).argmax(-1)
            assert (found % levels == level).all()


@LEVELS
def test_directions_of_any_table_are_found(level: int) -> None:
    codec = create("octahedral", 64, b="3")
    table = torch.tensor([0.05, 0.2, 0.3, 0.45, 0.55, 0.7, 0.8, 0.95]).numpy().tobytes()
    codec = replace(codec, direction_table=table)
    x = contents("gaussian", (1, 2, 300, 64), 0)
    found, expected = cpu_encode.encode(codec, x, level=level), codec.encode(x)
    assert found is not None
    for name in ("index.0", "sign.0"):
        assert float((bits(found[name]) == bits(expected[name])).float().mean()) >= 1 - ROUNDED_OTHERWISE


@pytest.mark.scenario
@pytest.mark.parametrize(("codec_id", "dim", "words"), CLOSE, ids=[f"{codec} {words} {dim}" for codec, dim, words in CLOSE])
def test_codes_and_scales_equal_those_of_formats(codec_id: str, dim: int, words: str) -> None:
    codec = create(codec_id, dim, **dict(word.split("=") for word in words.split(",")))
    x = contents("gaussian", (2, 2, 300, dim), dim) * torch.exp2(torch.arange(300) % 7 - 3.0)[:, None]
    x[0, 1, 5] = 0
    x = with_poisoned_padding(x.to(torch.bfloat16))
    assert cpu_encode.supports(codec)
    expected = codec.encode(x.float())
    for level in range(len(library.levels())):
        norms, errors = torch.full((2, 2, 2, 300), torch.nan)
        found = cpu_encode.encode(codec, x, level=level, norms=norms, errors=errors)
        assert found is not None
        assert_close_codes(codec, x, found, expected)
        torch.testing.assert_close(norms, norms_per_head(x), rtol=1e-5, atol=0)
        # Errors ignore that norms are rounded, and include channels that fill the last chunk.
        padded = dim % {"octahedral": 3, "quaternion": 4}.get(codec_id, 1)
        atol = 0.08 if padded else 0.03 if "log" in words else 3e-3
        torch.testing.assert_close(errors, relative_errors(codec, found, x), rtol=0.02, atol=atol)


def assert_close_codes(codec: Codec, x: torch.Tensor, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    codec.check({name: stream.numpy() for name, stream in found.items()}, "x")
    assert list(found) == list(expected)
    same = torch.ones(2, 2, 300, dtype=torch.bool)
    for name in codec.layout(2, 2, 300).keys() - codec.scale_layouts(2, 2, 300).keys():
        equal = bits(found[name]) == bits(expected[name])
        assert float(equal.float().mean()) >= 1 - ROUNDED_OTHERWISE, name
        same &= equal.all(-1)
    for name in codec.scale_layouts(2, 2, 300):
        # A code that is rounded otherwise moves the factor that keeps products right, and a step its minimum.
        torch.testing.assert_close(found[name], expected[name], rtol=4e-3, atol=1e-6)
        if expected[name].dtype == torch.float16:
            assert float((bits(found[name]) != bits(expected[name])).float().mean()) <= ROUNDED_OTHERWISE
        else:
            torch.testing.assert_close(found[name][same], expected[name][same], rtol=1e-5, atol=1e-6)
    assert squared_error(codec, x, found) == pytest.approx(squared_error(codec, x, expected), rel=1e-4)


@pytest.mark.scenario
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("family", ["scalar", "octahedral", "angle", "polar", "quaternion", "trellis"])
@given(data=st.data())
@settings(max_examples=15)
def test_every_codec_is_encoded_as_accurately_as_in_formats(family: str, data: st.DataObject) -> None:
    words, dim, side = data.draw(CASES[family].options), data.draw(st.sampled_from(DIMS)), data.draw(st.sampled_from("kv"))
    try:
        codec = create(family, dim, side, **words)
    except InvalidParameter:
        reject()
    # The search of formats/ for paths is slow.
    tokens = data.draw(st.integers(0, 40 if family == "trellis" else 200))
    x = contents(data.draw(st.sampled_from(CONTENTS)), (1, 2, tokens, dim), data.draw(st.integers(0, 2**32 - 1)))
    x = x.to(data.draw(st.sampled_from(DTYPES)))
    if not cpu_encode.supports(codec):
        assert codec.secondary > cpu_encode.MAX_SECONDARY  # type: ignore[attr-defined]
        return
    for level in range(len(library.levels())):
        streams = cpu_encode.encode(codec, with_poisoned_padding(x), threads=data.draw(st.integers(1, 3)), level=level)
        if streams is None:
            # Zeros and values of ordinary size are taken.
            assert not x.numel() or not (x == 0).all()
            norms = x.double().norm(dim=-1)
            largest = 400.0 if words.get("norm") == "log8" else 6e4
            assert not torch.isfinite(x).all() or float(norms[norms > 0].min()) < 2.0**-39 or float(norms.max()) > largest
            continue
        values = x.float()
        codec.check({name: stream.numpy() for name, stream in streams.items()}, "x")
        decoded = codec.decode(streams)
        assert torch.isfinite(decoded).all()
        CASES[family].check(codec, values, streams, decoded)
        expected = codec.decode(codec.encode(values))
        found, wanted = ((one - values).double().square().sum(-1)[~at_45_degrees(values, expected)].sum() for one in (decoded, expected))
        assert found <= 1.01 * wanted + 1e-9 * values.double().square().sum()


@LEVELS
@pytest.mark.parametrize("seed", [31, 49])
def test_a_subnormal_step_keeps_the_value_used_to_choose_codes(seed: int, level: int) -> None:
    codec, x = create("angle", 128, n="2"), contents("mixed", (1, 2, 19, 128), seed)
    streams = cpu_encode.encode(codec, x, level=level)
    assert streams is not None
    CASES["angle"].check(codec, x, streams, codec.decode(streams))


@pytest.mark.parametrize("recipe", ["kv=scalar:b=3", "kv=octahedral:b=3", "kv=angle:n=64", "kv=quaternion:s=3,r=3"])
@pytest.mark.parametrize(
    ("value", "error"), [*((value, InvalidParameter) for value in (torch.nan, -torch.inf)), (3e7, ValueTooLarge), (3e38, ValueTooLarge)]
)
def test_the_same_values_are_refused_as_in_formats(
    recipe: str, value: float, error: type[KvpackError], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = contents("gaussian", (1, 2, 40, 64), 0)
    x[0, 1, 35, 63] = value
    messages = []
    for backend in ("cpu", "torch"):
        monkeypatch.setenv(dispatch.VARIABLE, backend)
        with pytest.raises(error) as caught:
            kvpack.pack([(x, None)], recipe)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize(
    ("value", "error"), [*((value, InvalidParameter) for value in (torch.nan, torch.inf, -torch.inf)), (2e5, ValueTooLarge)]
)
def test_refused_values_are_named(axis: str, value: float, error: type[KvpackError]) -> None:
    x = torch.randn(1, 2, 700, 64)
    x[0, 1, 650, 37] = value
    codec = create("group", 64, b="4", axis=axis)
    assert cpu_encode.supports(codec)
    assert cpu_encode.encode(codec, x) is None
    with pytest.raises(error):
        kvpack.pack([(x, x)], f"kv=group:b=4,g=32,axis={axis}")


@pytest.mark.scenario
@LEVELS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_nan_in_group_input_is_found_anywhere(axis: str, dtype: torch.dtype, level: int) -> None:
    codec = create("group", 96, b="2", axis=axis)
    x = contents("gaussian", (1, 1, 40, 96), 0).to(dtype)
    assert cpu_encode.encode(codec, x, level=level) is not None
    for place in range(0, x.numel(), 7):
        for value in (torch.nan, -torch.nan, torch.inf, -torch.inf):
            worse = x.flatten().clone()
            worse[place] = value
            assert cpu_encode.encode(codec, worse.view(x.shape), level=level) is None


@pytest.mark.parametrize("recipe", ["kivi-2", "kivi-4;tail=64", "int-3", "fp8", "mxfp8", "nvfp4"])
def test_packed_caches_equal_those_of_torch(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [tuple(torch.randn(2, 3, 333, 128).to(torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2) for _ in range(2))]
    calls = []
    original = cpu_encode.encode
    monkeypatch.setattr(cpu_encode, "encode", lambda *arguments, **options: calls.append(arguments) or original(*arguments, **options))
    found = kvpack.pack(pairs, recipe)
    assert calls
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    expected = kvpack.pack(pairs, recipe)
    for side, other in zip(found[0].sides.values(), expected[0].sides.values(), strict=True):
        assert list(side.runs[0].streams) == list(other.runs[0].streams)
        for name, stream in side.runs[0].streams.items():
            assert torch.equal(stream.view(torch.uint8), other.runs[0].streams[name].view(torch.uint8))


@pytest.mark.parametrize("recipe", ["channel scale", "qjl", "outliers", "block rotation"])
def test_values_remaining_after_sidecars_are_encoded_by_the_kernels(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(torch.randn(2, 3, 333, 64).to(torch.bfloat16), torch.randn(2, 3, 333, 64).to(torch.bfloat16))]
    calls = []
    original = cpu_encode.encode
    monkeypatch.setattr(cpu_encode, "encode", lambda *arguments, **options: calls.append(arguments) or original(*arguments, **options))
    found = kvpack.pack(pairs, RECIPES[recipe])
    assert calls
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    expected = kvpack.pack(pairs, RECIPES[recipe])
    for x, mine, theirs in zip(pairs[0], found[0].unpack(torch.float32), expected[0].unpack(torch.float32), strict=True):
        assert relative_error(mine, x) == pytest.approx(relative_error(theirs, x), rel=1e-3)
