"""Tests of encoding klt by Triton, compared with formats/.

Codes are equal except next to rounding boundaries, and gains match the errors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from kvpack.formats.basis import BasisRows, row_count, run_columns
from kvpack.formats.errors import InvalidParameter, MissingBasis
from kvpack.formats.klt import Klt
from support.interpreter import DEVICE, needs_loaded_bounds
from support.klt_bases import random_rows, with_widths_of_heads
from support.strategies import contents, with_poisoned_padding

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = [pytest.mark.kernels, needs_loaded_bounds, pytest.mark.usefixtures("uninitialized_is_poisoned")]

HEADS = 2

NEXT_TO_A_BOUND = 2.0**-18
"""Distance from the midpoint of two entries, relative to the token's norm, within which binary32 sums may select either entry."""

CASES = [
    pytest.param(128, bytes([6, 3, 2, 1, 1, 0, 0, 0]), "bfloat16", "fp16", id="widths that calibrations find"),
    pytest.param(128, bytes([1, 2, 3, 4, 5, 6, 7, 8]), "bfloat16", "fp16", id="every width"),
    pytest.param(96, bytes([1, 3, 0, 3, 1, 3]), "float16", "none", id="runs of one width apart"),
    pytest.param(64, bytes([3, 3, 3, 3]), "float32", "fp16", id="float32"),
    pytest.param(40, bytes([0, 2, 5]), "bfloat16", "fp16", id="a partial run"),
    pytest.param(5, bytes([3]), "float16", "fp16", id="few channels"),
    pytest.param(256, bytes([4, 2, 1, *[0] * 13]), "bfloat16", "fp16", id="many channels"),
]


def klt(dim: int, widths: bytes, gain: str = "fp16", rows: str = "basis") -> Klt:
    return Klt.from_widths(dim, bytes(range(32)), 0, "k", widths, gain, rows, BasisRows(random_rows(HEADS, dim, "k")[None]))


def values(dim: int, dtype: str, batch: int, tokens: int) -> torch.Tensor:
    """Return ``[batch, HEADS, tokens, dim]``. The tokens have different norms, and one is zero."""
    x = contents("gaussian", (batch, HEADS, tokens, dim), dim) * torch.exp2(torch.arange(tokens) % 7 - 3.0)[:, None]
    x[0, -1, 0] = 0
    return x.to(getattr(torch, dtype))


def encoded(codec: Klt, x: torch.Tensor) -> dict[str, torch.Tensor] | None:
    from kvpack.kernels.encode import encode

    with torch.device(DEVICE):
        streams = encode.encode(codec, with_poisoned_padding(x))
    return None if streams is None else {name: stream.cpu() for name, stream in streams.items()}


def check(codec: Klt, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> None:
    """Check that codes equal those of formats/ except next to a rounding boundary.

    If all codes are equal, gains may differ only by rounding.
    """
    expected = codec.encode(x.float())
    assert {name: (stream.shape, stream.dtype) for name, stream in streams.items()} == {
        name: (stream.shape, stream.dtype) for name, stream in expected.items()
    }
    assert codec.source is not None
    mine, theirs = ({**zip_codes(codec, found)} for found in (streams, expected))
    frame = x.double() @ codec.source.inverse.double() - codec.source.mean.double()
    room = NEXT_TO_A_BOUND * (x.double().norm(dim=-1, keepdim=True) * codec.source.inverse.double().abs().max() + 1)
    equal = torch.ones(x.shape[:3], dtype=torch.bool)
    for run, width in enumerate(codec.widths):
        if width:
            table = codec.source.table(run, width).double().expand(x.shape[0], -1, -1)
            value = frame[..., run_columns(run, codec.dim)]
            errors = [(table.gather(2, codes[run].flatten(2)).view(value.shape) - value).abs() for codes in (mine, theirs)]
            assert ((errors[0] - errors[1]).abs() <= 2 * room).all()
            equal &= (mine[run] == theirs[run]).all(-1)
    assert equal.float().mean() > 0.98
    if codec.gain != "none":
        torch.testing.assert_close(streams["gain"][equal], expected["gain"][equal], rtol=2e-3, atol=0)


def zip_codes(codec: Klt, streams: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the codes of each run of columns with the same width, int64 ``[batch, kv_head, token, column]``."""
    rest = dict(zip(sorted({*codec.widths} - {0}), codec.digits(streams), strict=True))
    found = {}
    for run, width in enumerate(codec.widths):
        if width:
            columns = run_columns(run, codec.dim)
            count = columns.stop - columns.start
            found[run], rest[width] = rest[width][..., :count].to(torch.int64), rest[width][..., count:]
    return found


@pytest.mark.scenario
@pytest.mark.parametrize(("dim", "widths", "dtype", "gain"), CASES)
def test_codes_equal_those_of_formats(dim: int, widths: bytes, dtype: str, gain: str) -> None:
    codec, x = klt(dim, widths, gain), values(dim, dtype, 2, 70)
    streams = encoded(codec, x)
    assert streams is not None
    check(codec, x, streams)


OF_HEADS = [
    pytest.param(64, bytes([5, 3, 2, 1, 1, 0, 0, 0, 8, 7, 6, 4, 0, 2, 1, 1]), "bfloat16", "none", id="widths of heads"),
    pytest.param(13, bytes([2, 3, 0, 5]), "float32", "fp16", id="partial runs of heads"),
    pytest.param(32, bytes([0, 0, 0, 0, 4, 1, 0, 1]), "float16", "fp16", id="a head without codes"),
]


@pytest.mark.parametrize(("dim", "widths", "dtype", "gain"), OF_HEADS)
def test_codes_with_widths_per_head_equal_those_of_formats(dim: int, widths: bytes, dtype: str, gain: str) -> None:
    from kvpack.kernels import codecs

    codec, x = with_widths_of_heads(klt(dim, bytes(-(-dim // 16) * [1]), gain), widths), values(dim, dtype, 2, 70)
    streams, expected = encoded(codec, x), codec.encode(x.float())
    assert streams is not None
    assert {name: (one.shape, one.dtype) for name, one in streams.items()} == {
        name: (one.shape, one.dtype) for name, one in expected.items()
    }
    codec.check({name: stream.numpy() for name, stream in streams.items()}, "x")
    mine, theirs = (replace(codec, gain="none").decode_frame({"codes": one["codes"]}).double() for one in (streams, expected))
    assert codec.source is not None
    frame = x.double() @ codec.source.inverse.double() - codec.source.mean.double()
    room = NEXT_TO_A_BOUND * (x.double().norm(dim=-1, keepdim=True) * codec.source.inverse.double().abs().max() + 1)
    errors = [(one - codec.source.mean.double() - frame).abs() for one in (mine, theirs)]
    assert ((errors[0] - errors[1]).abs() <= 2 * room).all()
    equal = (mine == theirs).all(-1)
    assert equal.float().mean() > 0.98
    if gain != "none":
        torch.testing.assert_close(streams["gain"][equal], expected["gain"][equal], rtol=2e-3, atol=0)
    # Bits of no column are looked for by threads of the host.
    assert codecs.codec_kernels(codec).has_rules(codec) == (dim % 8 == 0)


def test_codes_of_one_token_equal_those_of_formats() -> None:
    """Triton treats sizes of 1 as compile-time constants."""
    codec, x = klt(64, bytes([4, 1, 0, 0])), values(64, "bfloat16", 1, 1)
    streams = encoded(codec, x)
    assert streams is not None
    check(codec, x, streams)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_unsupported_options_are_left_to_formats() -> None:
    x = values(32, "float32", 1, 9)
    assert encoded(klt(32, bytes([3, 1]), rows="fp32"), x) is None
    codec = klt(32, bytes([3, 1]))
    assert codec.source is not None
    # The tables of a run follow one another, and the widest ones are the last.
    rows = codec.source.rows.clone()
    rows[..., 34:, :] = rows[..., 34:, :].flatten(2).flip(2).view(1, HEADS, row_count(32) - 34, 32)
    assert encoded(replace(codec, source=BasisRows(rows)), x) is None
    x[0, 1, 5] = 1e30
    assert encoded(codec, x) is None


def test_the_basis_must_have_as_many_heads() -> None:
    codec, x = klt(32, bytes([3, 1])), values(32, "float32", 1, 9)
    with pytest.raises(MissingBasis, match="no basis was passed"):
        encoded(replace(codec, source=None), x)
    with pytest.raises(InvalidParameter, match="the basis is for 2 heads, but the values have 1"):
        encoded(codec, x[:, :1])
