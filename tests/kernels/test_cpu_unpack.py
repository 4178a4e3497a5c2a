"""Tests of unpacking by the C kernels, which equals formats/ bit for bit unless a rotation sums values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack.coding import dispatch
from kvpack.formats.angle import Angle
from kvpack.formats.channel_scale import STREAM, ChannelScale
from kvpack.formats.klt import Klt
from kvpack.formats.outliers import Outliers
from kvpack.formats.qjl import Qjl
from kvpack.formats.sidecar import RawTokenSidecar
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.kernels.cpu import codecs as cpu_codecs
from kvpack.kernels.cpu import library
from kvpack.kernels.cpu import unpack as cpu_unpack
from kvpack.kernels.cpu.library import THREADS
from support.caches import random_pairs
from support.random_pages import sides

if TYPE_CHECKING:
    from kvpack.cache.side import Side

pytestmark = pytest.mark.skipif(not dispatch.c_is_built(), reason="the C kernels were not built")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv(THREADS, raising=False)


def by_c(side: Side, dtype: torch.dtype, threads: int | None = None, level: int = 0) -> torch.Tensor:
    out = torch.full((side.batch, side.heads, side.tokens, side.dim), torch.nan, dtype=dtype)
    assert cpu_unpack.unpack_into(side, out, threads, level)
    return out


def takes(side: Side, dtype: torch.dtype) -> bool:
    return cpu_unpack.unpack_into(side, torch.empty(side.batch, side.heads, side.tokens, side.dim, dtype=dtype))


def by_torch(side: Side, dtype: torch.dtype) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, "torch")
        return side.unpack(dtype)


def _klt_bound(side: Side) -> torch.Tensor:
    """Return twice the error that the spec allows (rule klt-8), ``[batch, kv_head, token, dim]``.

    It is twice because both decoders may have that error.
    """
    bounds = []
    for page in side.runs:
        # Raw tokens beside it are exact.
        codec = page.codec.without_sidecars
        assert isinstance(codec, Klt)
        rows = codec.basis_rows(page.streams)
        coded = codec.decode_frame(page.streams).double()
        sizes = rows.mean.double().abs() + (coded - rows.mean.double()).abs()
        bounds.append(2.0**-17 * sizes @ rows.matrix.double().abs())
    return torch.cat([*bounds, torch.zeros(side.tail.shape, dtype=torch.float64)], 2)


def assert_alike(found: torch.Tensor, side: Side, dtype: torch.dtype) -> None:
    expected = by_torch(side, dtype)
    assert found.dtype == dtype
    # A product with a step of binary32 is rounded once or twice, and the powers of logarithmic norms are sums.
    codec = side.codec.codec if isinstance(side.codec, CodecWithSidecars) else side.codec
    summed = isinstance(codec, Angle) and (codec.norm == "log" or codec.range == "fp32")
    summed |= isinstance(side.codec, CodecWithSidecars) and bool(side.codec.sketches)
    if side.codec.rotation.kind == "none" and not summed and not isinstance(codec, Klt):
        assert torch.equal(found, expected)
        return
    # The rounding of a dtype may turn a difference in the last bit of binary32 into one of its own.
    step = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    if isinstance(codec, Klt):
        assert ((found.double() - expected.double()).abs() <= _klt_bound(side) + step * expected.double().abs() + 2.0**-24).all()
        return
    norm = by_torch(side, torch.float32).double().norm(dim=-1, keepdim=True)
    # Scales multiply what a rotation rounded.
    norm *= max([1.0, *(float(page.streams[STREAM].max()) for page in side.runs if STREAM in page.streams and page.tokens)])
    assert ((found.double() - expected.double()).abs() <= 2.0**-18 * norm + step * expected.double().abs() + 2.0**-24).all()


@pytest.mark.scenario
@pytest.mark.parametrize("family", sorted(codec.id for codec in cpu_codecs.FAMILIES))
@given(data=st.data())
@settings(max_examples=15)
def test_any_side_agrees_with_formats(family: str, data: st.DataObject) -> None:
    side: Side = data.draw(
        sides(data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 300)), "k", family, True)
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    for level in range(len(library.levels())):
        assert_alike(by_c(side, dtype, threads=data.draw(st.integers(1, 3)), level=level), side, dtype)


@pytest.mark.parametrize("level", range(len(library.levels())), ids=library.levels())
def test_powers_of_two_of_any_size(level: int) -> None:
    side = kvpack.pack(random_pairs(1, 64), "kv=angle:n=64,norm=log4,range=fp32,rotation=none")[0].k
    assert side is not None
    exponents = [-999.0, -126.5, -126.0, -125.5, -0.5, 0.0, 20.25, 126.5, 127.5, 128.0, 500.0, torch.inf, 0.5, 127.0, -torch.inf, torch.nan]
    numbers, minima = side.runs[0].streams["range"], torch.tensor(4 * exponents)
    numbers[..., 0], numbers[..., 1] = 0, minima
    expected = minima.double().exp2().masked_fill(minima < -126, 0).float()
    found = by_c(side, torch.float32, level=level).unflatten(-1, (-1, 2)).double().norm(dim=-1).float()
    torch.testing.assert_close(found, expected[:, None].expand_as(found), rtol=2e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", range(len(library.levels())), ids=library.levels())
def test_floats_are_rounded_as_in_torch(level: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1, 1, 4096, 64), generator=generator).to(torch.int32)
    # Halfway cases, the ends of binary16, denormals, infinities.
    odd = torch.tensor([65519.9, 65520.0, 65504.0, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-25 * 1.5, 1 + 2.0**-8, 1 + 2.0**-11, torch.inf])
    bits.view(torch.float32)[0, 0, :10, 0], bits.view(torch.float32)[0, 0, :10, 1] = odd, -odd
    for stored in (torch.float32, torch.bfloat16, torch.float16):
        x = bits.view(torch.float32) if stored == torch.float32 else bits[..., :32].contiguous().view(stored)
        side = kvpack.pack([(x, None)], "raw")[0].k
        assert side is not None
        found, expected = by_c(side, dtype, level=level), x.to(dtype)
        numbers = ~expected.isnan()
        assert torch.equal(found.isnan(), ~numbers)
        integers: Any = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(found.view(integers)[numbers], expected.view(integers)[numbers])


@pytest.mark.parametrize("recipe", ["kivi-2", "octopus-3", "fp16"])
def test_a_cache_is_unpacked_in_c(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = cpu_unpack.unpack_into
    monkeypatch.setattr(cpu_unpack, "unpack_into", lambda *arguments: calls.append(arguments) or original(*arguments))
    cache = kvpack.pack(random_pairs(1, 100), recipe)
    cache.unpack()
    assert len(calls) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, "torch")
        cache.unpack()
    assert len(calls) == 2


@given(data=st.data())
@settings(max_examples=25)
def test_any_side_with_sidecars_agrees_with_formats(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(sorted(codec.id for codec in cpu_codecs.FAMILIES if codec.id != "raw")))
    batch, heads, tokens = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 300))
    side: Side = data.draw(sides(batch, heads, tokens, data.draw(st.sampled_from("kv")), family, False))
    dtype = data.draw(st.sampled_from(DTYPES))
    if takes(side, dtype):
        assert_alike(by_c(side, dtype), side, dtype)
    else:
        assert isinstance(side.codec, CodecWithSidecars)
        odd = [one for one in side.codec.sidecars if not isinstance(one, ChannelScale | RawTokenSidecar | Outliers | Qjl)]
        assert odd or len(side.codec.raw_token_sidecars) > 1 or len(side.runs) > 1


@pytest.mark.filterwarnings("ignore:.*which share")
@pytest.mark.parametrize(
    "recipe",
    [
        "octopus-3-scaled",
        "ott-2",
        "k=scalar:b=3,channel_scale=fp16,sinks=4;v=group:b=2,g=32,sinks=4",
        "octopus-qjl-2",
        "int-4-med3",
        "k=octahedral:b=3,qjl=fp16,outliers=2,sinks=4;v=group:b=3,g=32,outliers=2,scales=u8",
        "kv=group:b=2,scales=u8,token_scale=fp16-per-head,channel_scale=fp16",
        "k=group:b=2,qjl=fp32,token_scale=fp16;v=minifloat:element=e4m3,per=token,qjl=fp16",
    ],
)
def test_sidecars_are_unpacked(recipe: str) -> None:
    pairs = [(k * (1 + 40 * (torch.arange(k.shape[3]) == 5)), v) for k, v in random_pairs(1, 200)]
    cache = kvpack.pack(pairs, recipe).append(random_pairs(1, 70))
    for side in cache[0].sides.values():
        assert_alike(by_c(side, torch.float32), side, torch.float32)
        assert_alike(by_c(side, torch.bfloat16), side, torch.bfloat16)


def test_other_dtypes_and_sidecars_are_left_to_torch() -> None:
    cache = kvpack.pack(random_pairs(1, 100), "octopus-3")
    assert cache[0].unpack(torch.float64)[0].dtype == torch.float64  # type: ignore[union-attr]
    side = kvpack.pack(random_pairs(1, 100), "rotatekv-2")[0].k
    assert side is not None
    assert not takes(side, torch.float32)
