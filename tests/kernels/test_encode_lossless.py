"""Tests that Triton encodes lossless to the same bytes as formats/, in the interpreter anywhere and on CUDA devices.

interpreter.py describes which process runs which of these tests.
"""

from __future__ import annotations

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpack
from kvpack.coding import dispatch
from kvpack.formats.lossless import FLOAT_FORMATS, Lossless
from kvpack.formats.runs import Run
from support.interpreter import DEVICE, INTERPRETED, needs_loaded_bounds
from support.lossless_streams import DTYPES
from support.strategies import create, with_poisoned_padding

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("uninitialized_is_poisoned"), needs_loaded_bounds]

CONTENTS = ("normal", "any bits", "one value", "skewed", "special values")


def values(content: str, dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return values whose exponents are typical, uniform, all equal, almost all equal, or those of zeros, infinity and NaN."""
    generator = torch.Generator().manual_seed(seed)
    if content == "any bits":
        return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16).view(DTYPES[dtype])
    x = torch.randn(shape, generator=generator)
    if content == "one value":
        x.fill_(float(x.flatten()[0]))
    elif content == "skewed":
        x = torch.where(x > 3, x * 2**9, 1.0)
    x = x.to(DTYPES[dtype])
    if content == "special values":
        special = torch.tensor([0x7F80, -0x80, 0x7FC1, 0x7C00, -0x400, 0x7E01, -0x8000, 0, 1, -0x7FFF], dtype=torch.int16)
        x.view(torch.int16)[...] = special[torch.randint(10, shape, generator=generator)]
    return x


def check_streams(codec: Lossless, x: torch.Tensor, before: dict[str, torch.Tensor] | None = None) -> None:
    """Compare the streams of ``x``, passed as a view of a larger buffer, with those of formats/. ``before`` precedes them."""
    from kvpack.kernels.encode import encode

    preceding = None if before is None else {name: stream.to(DEVICE) for name, stream in before.items()}
    with torch.device(DEVICE):
        streams = encode.encode(codec, with_poisoned_padding(x), preceding)
    assert streams is not None
    run = codec.begin(Run((*x.shape,), x.device, lambda: iter((x,))), before)
    expected = {**run.encode(x, 0), **run.streams}
    assert list(streams) == list(codec.layout(*x.shape[:3]))
    for name, stream in expected.items():
        assert torch.equal(streams[name].cpu().view(torch.int16), stream.view(torch.int16)), name


@pytest.mark.scenario
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(
    ("dtype", "dim", "chunk", "tokens"),
    [("bf16", 128, 16, 40), ("bf16", 9, 32, 70), ("fp16", 20, 16, 33), ("bf16", 1, 16, 1), ("fp16", 64, 256, 20), ("bf16", 200, 64, 3)],
    ids=str,
)
def test_streams_equal_those_of_formats(content: str, dtype: str, dim: int, chunk: int, tokens: int) -> None:
    codec = create("lossless", dim, dtype=dtype, chunk=str(chunk))
    assert isinstance(codec, Lossless)
    check_streams(codec, values(content, dtype, (2, 3, tokens, dim), dim))


@pytest.mark.scenario
@settings(max_examples=20 if INTERPRETED else 10)
@given(st.data())
def test_any_run_is_encoded_like_in_formats(data: st.DataObject) -> None:
    """Any packing, and runs that follow others, whose tables they may reuse."""
    dtype, dim = data.draw(st.sampled_from(sorted(FLOAT_FORMATS))), data.draw(st.integers(1, 70))
    codec = Lossless(dim, dtype, data.draw(st.sampled_from((16, 32, 256))), (("signed_fractions", data.draw(st.integers(1, min(dim, 4)))),))
    shape = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70)), dim)
    contents = [data.draw(st.sampled_from(CONTENTS)) for _ in range(2)]
    x, other = (values(content, dtype, shape, data.draw(st.integers(0, 99))) for content in contents)
    check_streams(codec, x, codec.encode(other) if data.draw(st.booleans()) else None)


@pytest.mark.scenario
def test_packed_and_appended_caches_equal_those_of_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    caches = []
    for kernels, device in (("triton", DEVICE), ("torch", "cpu")):
        monkeypatch.setenv(dispatch.VARIABLE, kernels)
        x, y = (values("normal", "bf16", (1, 2, 70, 32), seed).to(device) for seed in range(2))
        cache = kvpack.pack([(x, y), (y, x)], "kv=lossless:chunk=16")
        caches.append(cache.append([(y * 512, x), (x, y)]).to("cpu"))
    for layers in zip(*caches, strict=True):
        for side in "kv":
            runs = [layer.sides[side].runs for layer in layers]
            for found, expected in zip(*runs, strict=True):
                for name, stream in expected.streams.items():
                    assert torch.equal(found.streams[name].view(torch.int16), stream.view(torch.int16)), name


def test_other_dtypes_and_long_rows_are_left_to_formats() -> None:
    from kvpack.kernels.encode import encode

    for dtype, dim in ((torch.float32, 16), (torch.float16, 16), (torch.bfloat16, 300)):
        assert encode.encode(create("lossless", dim, dtype="bf16"), torch.zeros(1, 1, 2, dim, dtype=dtype, device=DEVICE)) is None


def test_a_symbol_with_frequency_0_is_left_to_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.encode import encode

    codec, x = create("lossless", 16, dtype="bf16"), torch.ones(1, 1, 40, 16, dtype=torch.bfloat16, device=DEVICE)
    assert encode.encode(codec, x) is not None
    monkeypatch.setattr(Lossless, "choose_frequencies", lambda *_: numpy.eye(1, 256, 126, dtype=numpy.int64) * 4096)
    assert encode.encode(codec, x) is None


def test_a_run_that_decodes_to_other_values_is_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpack.kernels.encode import encode

    encoded = encode.encode

    def with_a_wrong_word(*arguments: object) -> dict[str, torch.Tensor]:
        streams = encoded(*arguments)
        assert streams is not None
        streams["words"].view(torch.int16)[..., 5] ^= 1
        return streams

    x = values("normal", "bf16", (1, 2, 70, 64), 0).to(DEVICE)
    monkeypatch.setattr(encode, "encode", with_a_wrong_word)
    cache = kvpack.pack([(x, x)], "lossless")
    for side in cache[0].unpack(torch.bfloat16):
        assert torch.equal(side.view(torch.int16), x.view(torch.int16))
