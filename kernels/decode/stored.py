"""Decoded tiles on their way to a tensor: back to the original frame, if asked for, and rounded to the tensor's dtype."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

if TYPE_CHECKING:
    from kvpack.formats.rotation import Rotation

_SMALLEST = tl.constexpr(2.0**-126)


@lru_cache(maxsize=64)
def signs_of(rotation: Rotation, size: int, device: torch.device) -> torch.Tensor:
    """The signs of a Hadamard rotation's matrix, float16 ``[size, size]``, zero beyond its head dim."""
    with torch.inference_mode(False):
        signs = rotation.matrix("cpu").sign().to(torch.float16)
        spare = size - rotation.dim
        return torch.nn.functional.pad(signs, (0, spare, 0, spare)).to(device)


@triton.jit
def load_signs(matrix: tl.tensor, CHANNELS: tl.constexpr) -> tl.tensor:
    """The matrix of ``signs_of``."""
    channel = tl.arange(0, CHANNELS)
    return tl.load(matrix + channel[:, None] * CHANNELS + channel[None, :])


@triton.jit
def original(value: tl.tensor, signs: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """Float32 ``[token, channel]`` rotated back, with products of binary16: each row is brought below 1 first, so none is too large.

    The error is below 2^-11 of the row's values in the 2-norm: about an eighth of what rounding to bfloat16 adds.
    """
    peak = tl.maximum(tl.max(tl.abs(value), 1), _SMALLEST)[:, None]
    turned = tl.dot((value * (1.0 / peak)).to(tl.float16), signs)
    ROOT: tl.constexpr = DIM**-0.5
    return turned * (peak * ROOT)


@triton.jit
def store_tile(
    out: tl.tensor, token_stride: tl.tensor, token: tl.tensor, channel: tl.tensor, count: tl.tensor, value: tl.tensor, DIM: tl.constexpr
) -> None:
    """Store ``[token, channel]`` of the first ``count`` tokens; ``out`` points at token 0."""
    tl.store(out + (token * token_stride + channel), value.to(out.dtype.element_ty), (token < count) & (channel < DIM))
