"""Final steps of decoding kernels: rotating a tile back to the original frame, and rounding and storing its values."""

# Triton compiles no conditional expressions of tensors, and its tuples are of several lengths.
# ruff: noqa: SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import is_power_of_two
from kvpack.formats.rotation import Rotation, hadamard

_MIN_NORMAL = tl.constexpr(2.0**-126)


MAX_MATRIX_DIM = 256
"""Maximum head dim for which a rotation is one matrix product. Rotations of larger dims are combined from products with a
``FACTOR``-channel matrix.
"""

FACTOR = 128

_MAX_MATRIX_DIM, _FACTOR = tl.constexpr(MAX_MATRIX_DIM), tl.constexpr(FACTOR)


def supports_rotation(rotation: Rotation) -> bool:
    """Return True if ``rotate_back`` supports ``rotation``: its head dim must be at most ``MAX_MATRIX_DIM`` or a power of two."""
    return rotation.dim <= MAX_MATRIX_DIM or is_power_of_two(rotation.dim)


@lru_cache(maxsize=64)
def rotation_signs(rotation: Rotation, size: int, device: torch.device) -> torch.Tensor:
    """Return the signs of the matrix of a Hadamard rotation, float16 ``[size, size]``, padded with zeros past the head dim.

    Above ``MAX_MATRIX_DIM``, the matrix is the Kronecker product of a Sylvester matrix and a small matrix ``[FACTOR, FACTOR]``, with a sign
    per column. The function then returns the small matrix, followed by the column signs, ``[size / FACTOR, FACTOR]``.
    """
    with torch.inference_mode(False):
        if size > MAX_MATRIX_DIM:
            # The first row of a Sylvester matrix is all ones, so the rotation's first row contains the column signs.
            columns = rotation.matrix("cpu")[0].sign().view(-1, FACTOR)
            factor = torch.tensor(hadamard(FACTOR), dtype=torch.float32, device="cpu")
            return torch.cat([factor, columns]).to(torch.float16).to(device)
        signs = rotation.matrix("cpu").sign().to(torch.float16)
        padding = size - rotation.dim
        return torch.nn.functional.pad(signs, (0, padding, 0, padding)).to(device)


@triton.jit
def load_signs(matrix: tl.tensor, CHANNELS: tl.constexpr) -> tl.tuple:
    """Load the result of ``rotation_signs``: the matrix and, if they are stored separately, the column signs."""
    SIZE: tl.constexpr = CHANNELS if CHANNELS <= _MAX_MATRIX_DIM else _FACTOR
    channel = tl.arange(0, SIZE)
    signs = tl.load(matrix + channel[:, None] * SIZE + channel[None, :])
    if SIZE == CHANNELS:
        result = (signs,)
    else:
        result = (signs, tl.load(matrix + SIZE * SIZE + tl.arange(0, CHANNELS)[None, :]).to(tl.float32))
    return result


@triton.jit
def rotate_back(value: tl.tensor, signs: tl.tuple, DIM: tl.constexpr) -> tl.tensor:
    """Apply the inverse rotation to float32 ``value`` ``[token, channel]``, with float16 products.

    Each row is first scaled to a largest magnitude of 1. The relative error in the 2-norm is below 2^-11, about an eighth of the error of
    rounding to bfloat16.
    """
    largest = tl.maximum(tl.max(tl.abs(value), 1), _MIN_NORMAL)[:, None]
    rotated = _multiply_hadamard(value * (1.0 / largest), signs[0])
    if len(signs) > 1:
        rotated = rotated * signs[1]
    ROOT: tl.constexpr = DIM**-0.5
    return rotated * (largest * ROOT)


@triton.jit
def _multiply_hadamard(value: tl.tensor, signs: tl.tensor) -> tl.tensor:
    """Multiply ``value`` by the Kronecker product of a Sylvester matrix and ``signs``.

    The Sylvester part is computed by sums and differences.
    """
    TOKENS: tl.constexpr = value.shape[0]
    CHANNELS: tl.constexpr = value.shape[1]
    if signs.shape[0] == CHANNELS:
        product = tl.dot(value.to(tl.float16), signs)
    else:
        halves = tl.split(tl.permute(tl.reshape(value, (TOKENS, 2, CHANNELS // 2)), (0, 2, 1)))
        joined = tl.join(_multiply_hadamard(halves[0] + halves[1], signs), _multiply_hadamard(halves[0] - halves[1], signs))
        product = tl.reshape(tl.permute(joined, (0, 2, 1)), (TOKENS, CHANNELS))
    return product


@triton.jit
def store_tile(
    out: tl.tensor, token_stride: tl.tensor, token: tl.tensor, channel: tl.tensor, count: tl.tensor, value: tl.tensor, DIM: tl.constexpr
) -> None:
    """Store the first ``count`` tokens of ``value`` ``[token, channel]``. ``out`` points to token 0."""
    tl.store(out + (token * token_stride + channel), value.to(out.dtype.element_ty), (token < count) & (channel < DIM))
