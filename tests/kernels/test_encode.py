"""Tests of encoding by Triton, compared with formats/, in the interpreter anywhere and compiled on CUDA devices.

interpreter.py describes which process runs which of these tests.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import kvpack
from kvpack.coding import dispatch
from kvpack.coding.encoding import TORCH_DTYPES
from kvpack.formats.columns import Columns
from kvpack.formats.errors import InvalidParameter, KvpackError, ValueTooLarge
from kvpack.formats.norm_rule import relative_errors
from support.caches import random_pairs
from support.encode_columns_kernel import pack
from support.interpreter import DEVICE, INTERPRETED, needs_loaded_bounds
from support.sidecar_recipes import RECIPES as SIDECARS
from support.sidecar_recipes import relative_error
from support.strategies import CASES, CONTENTS, DIMS, contents, create, packings, with_poisoned_padding

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

DISTORTION = 1e-3
"""Largest permitted difference of the squared error from that of formats/, relative to the latter."""

ROUNDED_OTHERWISE = 5e-3
"""Largest share of words that may differ because rotations and norms are rounded in another order."""

EXACT = [
    ("group", 128, "k", "bfloat16", "b=2"),
    ("group", 128, "v", "bfloat16", "b=4"),
    ("group", 80, "k", "float16", "b=3,g=64"),
    ("group", 80, "v", "float32", "b=5,g=128"),
    ("group", 64, "v", "bfloat16", "b=7,g=128"),
    ("group", 96, "v", "float16", "b=8,g=4"),
    ("group", 256, "k", "bfloat16", "b=1,g=128"),
    ("group", 50, "k", "float32", "b=6,g=16,centre=zero"),
    ("group", 1, "v", "bfloat16", "b=2"),
    ("minifloat", 128, "k", "bfloat16", "element=e4m3"),
    ("minifloat", 80, "k", "float32", "element=e5m2,per=head,scales=fp16"),
    ("minifloat", 63, "v", "float16", "element=e4m3,per=token,scales=fp16"),
    ("minifloat", 128, "v", "bfloat16", "element=e2m1,per=token"),
    ("minifloat", 128, "k", "bfloat16", "element=e4m3,scales=e8m0"),
    ("minifloat", 40, "k", "float32", "element=e5m2,scales=e8m0"),
    ("minifloat", 256, "v", "bfloat16", "element=e2m1,scales=e8m0"),
    ("minifloat", 128, "k", "bfloat16", "element=e2m1,scales=e4m3"),
    ("minifloat", 1, "k", "float32", "element=e2m1,scales=e4m3"),
]

CLOSE = [
    ("group", 128, "k", "bfloat16", "b=2,token_scale=fp16,rotation=hadamard"),
    ("group", 80, "v", "float32", "b=4,g=16,token_scale=fp32"),
    ("group", 96, "v", "float16", "b=4,g=64,rotation=signed-hadamard,seed=3"),
    ("scalar", 128, "k", "bfloat16", "b=4"),
    ("scalar", 80, "k", "float16", "b=1"),
    ("scalar", 96, "v", "float32", "b=3,norm=fp32"),
    ("scalar", 64, "k", "bfloat16", "b=8,rotation=none"),
    ("scalar", 256, "k", "bfloat16", "b=2"),
    ("scalar", 128, "k", "bfloat16", "b=2,high=3,share=32"),
    ("scalar", 80, "v", "bfloat16", "b=5,high=8"),
    ("scalar", 64, "k", "bfloat16", "b=3,rounding=scaled"),
    ("scalar", 112, "v", "bfloat16", "b=8,rounding=scaled"),
    ("scalar", 80, "v", "float32", "b=2,high=4,norm=log8,rounding=scaled"),
    ("scalar", 128, "k", "bfloat16", "b=4,rounding=scaled"),
    ("octahedral", 128, "k", "bfloat16", "b=2"),
    ("octahedral", 128, "k", "bfloat16", "b=3"),
    ("octahedral", 128, "k", "bfloat16", "b=4"),
    ("octahedral", 80, "k", "float16", "b=3,arrangement=direct"),
    ("octahedral", 96, "v", "float32", "b=4,arrangement=direct,norm=fp32"),
    ("octahedral", 64, "k", "bfloat16", "b=2,arrangement=direct"),
    ("octahedral", 256, "k", "bfloat16", "b=3,rounding=local2x2"),
    ("octahedral", 100, "v", "bfloat16", "b=6,rotation=none"),
    ("octahedral", 64, "k", "bfloat16", "b=7,rounding=scalar"),
    ("octahedral", 64, "k", "bfloat16", "b_dir=1,b_norm=0"),
    ("octahedral", 64, "k", "bfloat16", "b_dir=2,b_norm=8,arrangement=direct"),
    ("octahedral", 64, "k", "bfloat16", "b_dir=5,b_norm=0,rounding=scalar"),
    ("angle", 128, "k", "bfloat16", "n=128"),
    ("angle", 80, "k", "float16", "n=128,norm=linear8,arrangement=direct"),
    ("angle", 96, "v", "float32", "n=48,norm=log4"),
    ("angle", 64, "k", "bfloat16", "n=1000,norm=fp32"),
    ("angle", 256, "k", "bfloat16", "n=65536,norm=log1,range=fp32"),
    ("angle", 10, "k", "bfloat16", "n=3,rotation=none"),
    ("quaternion", 128, "k", "bfloat16", "s=24,r=3"),
    ("quaternion", 80, "k", "float16", "s=9,r=4,arrangement=direct"),
    ("quaternion", 64, "v", "float32", "s=12,r=6,norm=fp32"),
    ("quaternion", 96, "k", "bfloat16", "s=7,r=8,rotation=hadamard"),
    ("quaternion", 256, "k", "bfloat16", "s=1,r=1"),
    ("quaternion", 10, "k", "bfloat16", "s=24,r=2"),
    ("polar", 128, "k", "bfloat16", "b=3"),
    ("polar", 128, "k", "bfloat16", "b=4.2.2.2"),
    ("polar", 96, "v", "float32", "b=5.3.3.2,norm=fp32"),
    ("polar", 80, "k", "float16", "b=4.4.2"),
    ("polar", 64, "k", "bfloat16", "b=8.6.1.1.1.1,rotation=none"),
    ("polar", 2, "k", "bfloat16", "b=4"),
    ("polar", 256, "v", "bfloat16", "b=2"),
    ("scalar", 128, "k", "bfloat16", "b=2,norm_rule=norm"),
    ("octahedral", 128, "k", "bfloat16", "b=3,norm_rule=norm"),
    ("polar", 64, "k", "bfloat16", "b=2,norm_rule=norm"),
    ("angle", 64, "k", "bfloat16", "n=8,norm=log3"),
    ("angle", 64, "k", "bfloat16", "n=8,norm=log3,norm_rule=norm"),
    ("quaternion", 64, "v", "bfloat16", "s=12,r=3,norm_rule=norm"),
    ("group", 128, "k", "bfloat16", "b=2,token_scale=fp16,norm_rule=norm"),
    ("group", 128, "k", "bfloat16", "b=2,token_scale=fp16-per-head,rotation=hadamard"),
    ("group", 80, "v", "float32", "b=4,g=16,token_scale=fp32-per-head,norm_rule=norm"),
    ("scalar", 64, "k", "bfloat16", "b=2,norm=log8"),
    ("octahedral", 96, "v", "float32", "b=3,norm=log8"),
    ("octahedral", 64, "k", "bfloat16", "b=3,norm=log8,norm_rule=norm"),
]

pytestmark = needs_loaded_bounds


def codec_of(codec_id: str, dim: int, side: str, words: str) -> Codec:
    return create(codec_id, dim, side, **dict(word.split("=") for word in words.split(",")))


def cases(rows: list[tuple[str, int, str, str, str]]) -> Any:
    parameters = [pytest.param(*row, id=f"{row[0]} {row[4]} {row[1]} {row[3]}") for row in rows]
    return pytest.mark.parametrize(("codec_id", "dim", "side", "dtype", "words"), parameters)


def values(dim: int, dtype: str, batch: int = 1, tokens: int = 17) -> torch.Tensor:
    """Return ``[batch, 2, tokens, dim]``. The tokens have different norms, and one is zero."""
    x = contents("gaussian", (batch, 2, tokens, dim), dim)
    x *= torch.exp2(torch.arange(tokens) % 7 - 3.0)[:, None]
    x[0, 1, 5] = 0
    return x.to(getattr(torch, dtype))


def encoded(codec: Codec, x: torch.Tensor, errors: torch.Tensor | None = None) -> dict[str, torch.Tensor] | None:
    """Encode ``x`` with the kernels, passed as a view of a larger buffer of ones that is neither contiguous nor aligned."""
    from kvpack.kernels.encode import encode

    with torch.device(DEVICE):
        streams = encode.encode(codec, with_poisoned_padding(x), errors=errors)
    return None if streams is None else {name: stream.cpu() for name, stream in streams.items()}


def bits(stream: torch.Tensor) -> torch.Tensor:
    return stream.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[stream.element_size()])


def squared_error(codec: Codec, x: torch.Tensor, streams: dict[str, torch.Tensor]) -> float:
    return float((codec.decode(streams) - x.float()).double().square().sum())


@pytest.mark.kernels
@pytest.mark.usefixtures("uninitialized_is_poisoned")
@cases(EXACT)
def test_codes_and_scales_equal_those_of_formats(codec_id: str, dim: int, side: str, dtype: str, words: str) -> None:
    codec, x = codec_of(codec_id, dim, side, words), values(dim, dtype, 2, 70)
    streams, expected = encoded(codec, x), codec.encode(x.float())
    assert streams is not None
    assert list(streams) == list(codec.layout(2, 2, 70))
    for name, stream in expected.items():
        assert torch.equal(bits(streams[name]), bits(stream)), name


@pytest.mark.kernels
@pytest.mark.usefixtures("uninitialized_is_poisoned")
@cases(CLOSE)
def test_distortion_equals_that_of_formats(codec_id: str, dim: int, side: str, dtype: str, words: str) -> None:
    codec, x = codec_of(codec_id, dim, side, words), values(dim, dtype)
    streams, expected = encoded(codec, x), codec.encode(x.float())
    assert streams is not None
    layout = codec.layout(1, 2, 17)
    assert {name: (stream.dtype, tuple(stream.shape)) for name, stream in streams.items()} == {
        name: (TORCH_DTYPES[entry.dtype], entry.shape) for name, entry in layout.items()
    }
    codec.check({name: stream.numpy() for name, stream in streams.items()}, "x")
    for name, stream in expected.items():
        if stream.dtype == torch.uint16 or (name, stream.dtype) == ("norm", torch.uint8):
            assert (bits(streams[name]) != bits(stream)).float().mean() <= ROUNDED_OTHERWISE, name
        else:
            torch.testing.assert_close(streams[name], stream, rtol=2e-3 if stream.dtype == torch.float16 else 1e-5, atol=1e-6)
    assert squared_error(codec, x, streams) == pytest.approx(squared_error(codec, x, expected), rel=DISTORTION)
    if codec.summary.direction_spread:
        errors = torch.full(x.shape[:3], torch.nan, device=DEVICE)
        measured = encoded(codec, x, errors)
        assert measured is not None
        assert all(torch.equal(bits(measured[name]), bits(stream)) for name, stream in streams.items())
        # Errors ignore that norms are rounded, and include channels that fill the last chunk.
        padded = dim % {"octahedral": 3, "quaternion": 4}.get(codec_id, 1)
        atol = 0.08 if padded else 0.03 if "log" in words else 3e-3
        torch.testing.assert_close(errors.cpu(), relative_errors(codec, streams, x), rtol=0.02, atol=atol)


@pytest.mark.kernels
@pytest.mark.usefixtures("uninitialized_is_poisoned")
@cases([CLOSE[0], CLOSE[1], CLOSE[3], CLOSE[11], CLOSE[22], CLOSE[28], CLOSE[34]])
def test_one_head_of_one_token_is_encoded_like_in_formats(codec_id: str, dim: int, side: str, dtype: str, words: str) -> None:
    """Triton treats sizes of 1 as compile-time constants."""
    codec, x = codec_of(codec_id, dim, side, words), contents("gaussian", (1, 1, 1, dim), 0).to(getattr(torch, dtype))
    streams = encoded(codec, x)
    assert streams is not None
    codec.check({name: stream.numpy() for name, stream in streams.items()}, "x")
    # A group of one token is exact except for a few roundings of binary32, whose order depends on the processor.
    rounded = float(x.double().square().sum()) * (2.0**-21) ** 2
    assert squared_error(codec, x, streams) == pytest.approx(squared_error(codec, x, codec.encode(x.float())), rel=0.02, abs=rounded)


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=10 if INTERPRETED else 5)
@given(st.data())
def test_any_options_and_values_are_encoded_like_in_formats(data: st.DataObject) -> None:
    codec_id = data.draw(st.sampled_from(("group", "minifloat", "scalar", "octahedral", "angle", "quaternion", "polar")))
    words, dim, side = data.draw(CASES[codec_id].options), data.draw(st.sampled_from(DIMS)), data.draw(st.sampled_from("kv"))
    try:
        codec = create(codec_id, dim, side, **words)
    except InvalidParameter:
        reject()
    x = contents(data.draw(st.sampled_from(CONTENTS)), (1, 1, data.draw(st.integers(1, 70)), dim), data.draw(st.integers(0, 2**32 - 1)))
    streams = encoded(codec, x)
    if streams is None:
        return
    # What the kernels encode, the codec takes, and no better.
    expected = codec.encode(x)
    codec.check({name: stream.numpy() for name, stream in streams.items()}, "x")
    decoded = codec.decode(streams)
    assert torch.isfinite(decoded).all()
    CASES[codec_id].check(codec, x, streams, decoded)
    power = float(x.double().square().sum())
    assert squared_error(codec, x, streams) <= squared_error(codec, x, expected) * 1.01 + 1e-9 * power


@pytest.mark.kernels
def test_a_subnormal_step_keeps_the_value_used_to_choose_codes() -> None:
    codec, x = create("angle", 128, n="2"), contents("mixed", (1, 2, 19, 128), 31)
    streams = encoded(codec, x)
    assert streams is not None
    CASES["angle"].check(codec, x, streams, codec.decode(streams))


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("codec_id", "dim", "words"),
    [
        pytest.param("raw", 64, "dtype=fp16", id="raw"),
        pytest.param("polar", 80, "b=3", id="polar with an odd level"),
        pytest.param("group", 64, "b=2,scales=u8", id="scales of 8 bits"),
        pytest.param("octahedral", 64, "b=3,rounding=full", id="full search"),
        pytest.param("octahedral", 64, "b=7", id="levels beyond the grid search"),
        pytest.param("scalar", 320, "b=3", id="dim"),
        pytest.param("scalar", 64, "b=3,qjl=fp16", id="sidecar"),
    ],
)
def test_unsupported_options_are_left_to_formats(codec_id: str, dim: int, words: str) -> None:
    assert encoded(codec_of(codec_id, dim, "k", words), values(dim, "float32")) is None


@pytest.mark.kernels
@pytest.mark.skipif(not INTERPRETED, reason="the interpreter stands for other GPUs")
def test_devices_without_bfloat16_products_are_left_to_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels import gpu

    for capability, supported in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
        monkeypatch.setattr(gpu, "_without_device", gpu.INTERPRETER._replace(capability=capability))
        assert (encoded(codec_of("scalar", 64, "k", "b=3"), values(64, "float32")) is not None) == supported


RECIPES = (
    "kv=group:b=4",
    "kv=group:b=2,token_scale=fp16",
    "kv=group:b=2,token_scale=fp16-per-head",
    "kv=scalar:b=3",
    "kv=octahedral:b=3",
    "kv=angle:n=64",
    "kv=quaternion:s=3,r=3",
)


@pytest.mark.scenario
@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("value", "error"),
    [(float("nan"), InvalidParameter), (float("-inf"), InvalidParameter), (3e7, ValueTooLarge), (3e38, ValueTooLarge)],
    ids=str,
)
def test_the_same_values_are_refused_as_in_formats(
    recipe: str, value: float, error: type[KvpackError], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = contents("gaussian", (1, 2, 40, 64), 0)
    # Of either sign, so that a center of a group does not make up for it.
    x[0, 1, 35, 63], x[0, 1, 35, 62] = value, -value if error is ValueTooLarge else 0.0
    messages = []
    for backend in dispatch.BACKENDS:
        monkeypatch.setenv(dispatch.VARIABLE, backend)
        with pytest.raises(error) as caught:
            kvpack.pack([(x.to(DEVICE), None)], recipe)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("recipe", RECIPES[3:])
@pytest.mark.parametrize("size", [2.0**-130, 2.0**-60, 2.0**70], ids=lambda size: f"{size:.0e}")
def test_values_whose_squares_exceed_binary32_are_left_to_formats(recipe: str, size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe += {"scalar": ",norm=fp32", "octahedral": ",norm=fp32", "angle": ",range=fp32", "quaternion": ",norm=fp32"}[
        recipe.split(":")[0].removeprefix("kv=")
    ]
    x = (contents("gaussian", (1, 1, 3, 64), 0) * size).to(DEVICE)
    found = []
    for backend in dispatch.BACKENDS:
        monkeypatch.setenv(dispatch.VARIABLE, backend)
        (page,) = kvpack.pack([(x, None)], recipe)[0].sides["k"].runs
        found.append(page.streams)
    for name, stream in found[0].items():
        assert torch.equal(bits(found[1][name]), bits(stream)), name


@pytest.mark.kernels
@pytest.mark.parametrize("backend", dispatch.BACKENDS)
def test_pack_and_append_use_the_kernels(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.encode import encode

    calls = []

    def recorded(codec: Codec, x: torch.Tensor, *arguments: Any) -> dict[str, torch.Tensor] | None:
        calls.append((codec.id, x.shape[2]))
        return original(codec, x, *arguments)

    original = encode.encode
    monkeypatch.setattr(encode, "encode", recorded)
    monkeypatch.setenv(dispatch.VARIABLE, backend)
    pairs = [(k.to(DEVICE), v.to(DEVICE)) for k, v in random_pairs(1, 48, dims=(64, 80))]
    cache = kvpack.pack([(k[:, :, :32], v[:, :, :32]) for k, v in pairs], "k=scalar:b=3;v=octahedral:b=3")
    cache = cache.append([(k[:, :, 32:], v[:, :, 32:]) for k, v in pairs])
    assert calls == ([("scalar", 32), ("octahedral", 32), ("scalar", 16), ("octahedral", 16)] if backend == "triton" else [])
    # Pages are decoded in threads, and Triton's interpreter knows one.
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    for found, x in zip(cache[0].unpack(torch.float32), pairs[0], strict=True):
        assert found is not None
        assert (found - x).norm() / x.norm() < 0.25


@pytest.mark.kernels
@pytest.mark.parametrize("recipe", ["channel scale", "qjl", "outliers", "block rotation"])
def test_values_remaining_after_sidecars_are_encoded_by_the_kernels(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.encode import encode

    calls = []
    original = encode.encode
    monkeypatch.setattr(encode, "encode", lambda *arguments: calls.append(original(*arguments)) or calls[-1])
    pairs = [tuple(torch.randn(2, 1, 2, 70, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE))]
    packed = {}
    for backend in dispatch.BACKENDS:
        monkeypatch.setenv(dispatch.VARIABLE, backend)
        packed[backend] = kvpack.pack(pairs, SIDECARS[recipe])
    # The first are of both sides whole, the others of what is left of them.
    assert [streams is None for streams in calls] == [True, False, True, False]
    # Pages are decoded in threads, and Triton's interpreter knows one.
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    mine, theirs = (packed[backend][0].unpack(torch.float32) for backend in ("triton", "torch"))
    for x, one, other in zip(pairs[0], mine, theirs, strict=True):
        assert relative_error(one, x) == pytest.approx(relative_error(other, x), rel=5e-3)


@pytest.mark.kernels
@settings(max_examples=8)
@given(packings(), st.integers(0, 2**32 - 1))
def test_digits_are_packed_as_in_formats(packing: Columns, seed: int) -> None:
    from kvpack.kernels.encode.columns import Term, plan_packing

    generator = torch.Generator().manual_seed(seed)
    digits = [torch.randint(alphabet, (5, packing.symbols), generator=generator) for alphabet in packing.alphabets]
    terms = [Term(number, (base - 1).bit_length(), digit=number) for number, base in enumerate(packing.bases)]
    codec: Any = SimpleNamespace(packings=lambda: {"codes": packing})
    plan = plan_packing(codec, {"codes": terms}, max(16, 1 << (packing.symbols - 1).bit_length()), torch.device(DEVICE))
    assert plan is not None
    for plane, expected in zip(pack(plan, packing, digits, DEVICE), packing.pack(digits), strict=True):
        assert torch.equal(bits(plane), bits(expected))


@pytest.mark.cuda
def test_kernel_offsets_of_tokens_are_64_bit() -> None:
    from kvpack.kernels.encode import encode

    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free memory on the device")
    codec = create("group", 128, "k", b="8")
    x = torch.zeros(1, 1, 2**24 + 64, 128, dtype=torch.bfloat16, device=DEVICE)
    x[:, :, -64:] = values(128, "bfloat16", 1, 64)[:, :1].to(DEVICE)
    streams = encode.encode(codec, x)
    assert streams is not None
    for name, stream in codec.encode(x[:, :, -64:].float().cpu()).items():
        assert torch.equal(bits(streams[name][:, :, -stream.shape[2] :].cpu()), bits(stream)), name


@pytest.mark.kernels
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4", "kv=minifloat:element=e5m2,per=head,scales=fp16"])
def test_a_run_keeps_the_scales_of_the_previous_run(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales are chosen as in formats/: kept if they fit, enlarged with room to grow, and reduced if values are far smaller."""
    x = torch.randn(2, 2, 9, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(DEVICE)
    found = {}
    for backend in dispatch.BACKENDS:
        monkeypatch.setenv(dispatch.VARIABLE, backend)
        cache = kvpack.pack([(x, x)], recipe)
        for factor in (0.5, 8.0, 0.01):
            cache = cache.append([(factor * x, x)])
        found[backend] = [page.streams for page in cache[0].k.merged().runs]
    assert len(found["torch"]) == len(found["triton"]) > 1
    for one, other in zip(found["torch"], found["triton"], strict=True):
        assert all(torch.equal(bits(one[name]), bits(other[name])) for name in one)


@pytest.mark.kernels
@pytest.mark.parametrize("live", [False, True], ids=["pack", "live"])
def test_a_token_that_fits_its_groups_badly_is_raw_or_named(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same applies to windows of tokens that a live cache encodes."""
    if INTERPRETED:
        monkeypatch.setenv("KVPACK_KERNELS", "triton")
    k, v = (x.to(DEVICE) for x in torch.randn(2, 1, 2, 256, 128, generator=torch.Generator().manual_seed(0)))
    v[0, 1, 77, 9] = 40

    def encode(recipe: str) -> kvpack.Cache:
        if not live:
            return kvpack.pack([(k, v)], recipe)
        cache = kvpack.LiveCache(recipe, layers=1)
        cache.update(0, k, v)
        return cache.freeze(packed=True)

    with pytest.warns(kvpack.KvpackWarning, match=r"layers\[0\].v: in 1 of .* token 77 .*, head 1 has .* times the typical error"):
        encode("int-3;raw=0")
    _, decoded = encode("int-3")[0].unpack(torch.float32)
    assert decoded is not None
    assert torch.equal(decoded[0, :, 77], v[0, :, 77].to(torch.bfloat16).float())
