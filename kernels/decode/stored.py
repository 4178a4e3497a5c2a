"""Store decoded tiles in a tensor: rotate them back to the original frame, if requested, and round them to its dtype."""

# Triton compiles no conditional expressions of tensors, and its tuples are of several lengths.
# ruff: noqa: SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import is_power_of_two
from kvpack.formats.rotation import hadamard

if TYPE_CHECKING:
    from kvpack.formats.rotation import Rotation

_SMALLEST = tl.constexpr(2.0**-126)


LARGEST_MATRIX = 256
"""Head dim up to which a rotation is one product; above it, products with ``FACTOR`` channels are joined."""

FACTOR = 128

_LARGEST_MATRIX, _FACTOR = tl.constexpr(LARGEST_MATRIX), tl.constexpr(FACTOR)


def turns_back(rotation: Rotation) -> bool:
    """Return True if ``original`` supports the rotation; above ``LARGEST_MATRIX`` channels, only powers of two."""
    return rotation.dim <= LARGEST_MATRIX or is_power_of_two(rotation.dim)


@lru_cache(maxsize=64)
def signs_of(rotation: Rotation, size: int, device: torch.device) -> torch.Tensor:
    """Return the signs of a Hadamard rotation's matrix, float16 ``[size, size]``, zero beyond its head dim.

    Above ``LARGEST_MATRIX`` it is the Kronecker product of Sylvester's matrix and that of ``FACTOR`` channels, times the signs of its
    columns: ``[FACTOR, FACTOR]`` and then the signs, ``[size / FACTOR, FACTOR]``.
    """
    with torch.inference_mode(False):
        if size > LARGEST_MATRIX:
            # All entries of the first row of Sylvester's matrix are 1.
            columns = rotation.matrix("cpu")[0].sign().view(-1, FACTOR)
            factor = torch.tensor(hadamard(FACTOR), dtype=torch.float32, device="cpu")
            return torch.cat([factor, columns]).to(torch.float16).to(device)
        signs = rotation.matrix("cpu").sign().to(torch.float16)
        spare = size - rotation.dim
        return torch.nn.functional.pad(signs, (0, spare, 0, spare)).to(device)


@triton.jit
def load_signs(matrix: tl.tensor, CHANNELS: tl.constexpr) -> tl.tuple:
    """Load the matrix of ``signs_of``, and the signs of its columns if they are separate."""
    SIZE: tl.constexpr = CHANNELS if CHANNELS <= _LARGEST_MATRIX else _FACTOR
    channel = tl.arange(0, SIZE)
    signs = tl.load(matrix + channel[:, None] * SIZE + channel[None, :])
    if SIZE == CHANNELS:
        found = (signs,)
    else:
        found = (signs, tl.load(matrix + SIZE * SIZE + tl.arange(0, CHANNELS)[None, :]).to(tl.float32))
    return found


@triton.jit
def original(value: tl.tensor, signs: tl.tuple, DIM: tl.constexpr) -> tl.tensor:
    """Rotate float32 ``[token, channel]`` back with binary16 products; rows are first scaled below 1, so that none overflows.

    The error is below 2^-11 of the row's values in the 2-norm: about an eighth of what rounding to bfloat16 adds.
    """
    peak = tl.maximum(tl.max(tl.abs(value), 1), _SMALLEST)[:, None]
    turned = _turned(value * (1.0 / peak), signs[0])
    if len(signs) > 1:
        turned = turned * signs[1]
    ROOT: tl.constexpr = DIM**-0.5
    return turned * (peak * ROOT)


@triton.jit
def _turned(value: tl.tensor, signs: tl.tensor) -> tl.tensor:
    """Multiply by the Kronecker product of Sylvester's matrix and ``signs``; sums and differences of halves come first."""
    TOKENS: tl.constexpr = value.shape[0]
    CHANNELS: tl.constexpr = value.shape[1]
    if signs.shape[0] == CHANNELS:
        turned = tl.dot(value.to(tl.float16), signs)
    else:
        halves = tl.split(tl.permute(tl.reshape(value, (TOKENS, 2, CHANNELS // 2)), (0, 2, 1)))
        both = tl.join(_turned(halves[0] + halves[1], signs), _turned(halves[0] - halves[1], signs))
        turned = tl.reshape(tl.permute(both, (0, 2, 1)), (TOKENS, CHANNELS))
    return turned


@triton.jit
def store_tile(
    out: tl.tensor, token_stride: tl.tensor, token: tl.tensor, channel: tl.tensor, count: tl.tensor, value: tl.tensor, DIM: tl.constexpr
) -> None:
    """Store ``[token, channel]`` of the first ``count`` tokens; ``out`` points to token 0."""
    tl.store(out + (token * token_stride + channel), value.to(out.dtype.element_ty), (token < count) & (channel < DIM))
