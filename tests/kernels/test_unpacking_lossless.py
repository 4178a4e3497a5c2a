"""Tests of decoding lossless by Triton, bit for bit, in the interpreter anywhere and on CUDA devices.

interpreter.py describes which process runs which of these tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import kvpack
from kvpack.coding import dispatch
from kvpack.formats.errors import InvalidParameter
from kvpack.formats.lossless import Lossless
from support.interpreter import DEVICE
from support.lossless_streams import DTYPES
from support.strategies import create

if TYPE_CHECKING:
    from kvpack.cache.side import Side

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("uninitialized_is_poisoned")]


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return normally distributed values with infinities, several kinds of NaN, zeros of both signs, and subnormal numbers."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    special = torch.tensor([0x7F80, -0x80, 0x7FC1, 0x7C00, -0x400, 0x7E01, -0x8000, 0, 1, -0x7FFF], dtype=torch.int16)
    x.view(torch.int16).view(-1)[3 : 3 + 10 * 7 : 7] = special
    return x


def unpacked(side: Side, dtype: torch.dtype) -> torch.Tensor:
    """Unpack all packed tokens of a side by kernels into a tensor with unusual strides, and return it."""
    from kvpack.kernels.decode import sides

    out = torch.zeros(side.batch, side.packed_tokens, side.heads, side.dim, dtype=dtype, device=DEVICE).transpose(1, 2)
    assert sides.unpack_into(side.to(DEVICE), 0, side.packed_tokens, out) == []
    return out.cpu()


@pytest.mark.scenario
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("dtype", "dim", "chunk"),
    [("bf16", 32, 16), ("bf16", 20, 32), ("bf16", 9, 16), ("fp16", 16, 32), ("fp16", 6, 16)],
    ids=str,
)
def test_every_bit_of_any_page_is_restored(dtype: str, dim: int, chunk: int) -> None:
    x = values(DTYPES[dtype], (2, 1, 150, dim))
    cache = kvpack.pack([(x[:, :, :64], None)], f"kv=lossless:dtype={dtype},chunk={chunk}")
    # Other exponents: runs of tables of their own, and pages of them.
    x[:, :, 64:96] *= 512
    side = cache.append([(x[:, :, 64:96], None)]).append([(x[:, :, 96:], None)])[0].k
    assert side is not None
    assert len(side.runs) > 1
    # The last chunk is left with some of its tokens.
    side = side.slice(0, side.packed_tokens - 5)
    expected = x[:, :, : side.packed_tokens]
    assert torch.equal(unpacked(side, DTYPES[dtype]).view(torch.int16), expected.contiguous().view(torch.int16))
    for other in {torch.float32, torch.bfloat16, torch.float16} - {DTYPES[dtype]}:
        finite = torch.isfinite(expected)
        found = unpacked(side, other)
        assert torch.equal(found.isnan(), expected.isnan())
        # The interpreter cuts bits of bfloat16 off.
        error = (found.double() - expected.double()).abs()[finite & torch.isfinite(found)]
        bound = expected.double().abs()[finite & torch.isfinite(found)]
        assert (error <= (0 if other == torch.float32 else 2.0**-7) * bound + 2.0**-24 * (other == torch.float16)).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_device_results_equal_cpu_results(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(DTYPES[dtype], (1, 2, 70, 16))
    cache = kvpack.pack([(x, x)], "lossless")
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    k, v = cache.to(DEVICE)[0].unpack(DTYPES[dtype])
    for found in (k, v):
        assert found is not None
        assert torch.equal(found.cpu().view(torch.int16), x.view(torch.int16))
    q = torch.randn(1, 4, 3, 16, generator=torch.Generator().manual_seed(1))
    plain = torch.where(torch.isfinite(x), x, 0)
    monkeypatch.delenv(dispatch.VARIABLE)
    cache = kvpack.pack([(plain, plain)], "lossless")
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    found = kvpack.attend(q.to(DEVICE), cache.to(DEVICE)[0]).cpu()
    monkeypatch.setenv(dispatch.VARIABLE, "torch")
    torch.testing.assert_close(found, kvpack.attend(q, cache[0]), rtol=1e-4, atol=1e-5)


def test_invalid_words_decode_to_arbitrary_values() -> None:
    from kvpack.kernels.decode import decode
    from kvpack.kernels.decode.rows import PackedPart

    codec = create("lossless", 32, dtype="bf16", chunk="16")
    assert isinstance(codec, Lossless)
    streams = codec.encode(values(torch.bfloat16, (1, 2, 40, 32)))
    generator = torch.Generator().manual_seed(0)
    for name, stream in streams.items():
        if name != "word_counts":
            stream.view(torch.int16).random_(generator=generator)
    streams["word_counts"].fill_(65535)
    there = {name: stream.to(DEVICE) for name, stream in streams.items()}
    out = torch.full((1, 2, 40, 32), -1, dtype=torch.bfloat16, device=DEVICE)
    assert decode.decode_into(codec, [PackedPart(there, 40, 0)], out, True)
    assert decode.decode_into(codec, [], out, True)
    with pytest.raises(InvalidParameter, match=r"states has shape \[1, 2, 2, 64\], but the codec needs shape \[1, 2, 3, 64\]"):
        decode.decode_into(codec, [PackedPart({**there, "states": there["states"][:, :, 1:]}, 40, 0)], out, True)
