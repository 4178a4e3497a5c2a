"""Encoder helpers for a basis: matrix inverses, and bounds of decoded values (spec/basis.md)."""

from __future__ import annotations

import math

from .errors import ValueTooLarge
from .lazy import numpy, torch

MAX_DECODED = (2 - 2.0**-23) * 2.0**127
"""The largest float32."""

MAX_INVERSE_ERROR = 2.0**-8
"""Maximum error of a value multiplied by the inverse and then by the matrix, relative to the token's largest value (rule basis-19)."""


def invert_for_encoding(matrices: torch.Tensor, name: str) -> torch.Tensor:
    """Return the inverse of ``matrices`` ``[..., column, channel]`` as float32 on the CPU. ``name`` describes the matrices in messages.

    Raises ValueTooLarge if a matrix has no inverse, or if the inverse changes values by more than ``MAX_INVERSE_ERROR``.
    """
    # PyTorch 2.13 inverts batches incorrectly, or hangs, if its number of threads differs from OpenMP's.
    exact = matrices.to(torch.float64).cpu().numpy()
    try:
        with numpy.errstate(all="ignore"):
            inverse = numpy.linalg.inv(exact).astype(numpy.float32)
            error = float(numpy.abs(inverse.astype(numpy.float64) @ exact - numpy.eye(exact.shape[-1])).sum(-2).max())
    except numpy.linalg.LinAlgError:
        error = math.inf
    if not error <= MAX_INVERSE_ERROR:
        fault = f"its error is {error:.3g} of a token's largest value, but must be at most {MAX_INVERSE_ERROR:.3g}"
        fault = f"the inverse of {name} is inaccurate: {fault}" if math.isfinite(error) else f"{name} has no inverse"
        raise ValueTooLarge(f"{fault}. This basis can decode values, but not encode them: run kvpack calibrate on more text")
    return torch.from_numpy(inverse)


def check_decoded_range(largest: torch.Tensor, matrices: torch.Tensor, mean: torch.Tensor | None, name: str) -> None:
    """Raise ValueTooLarge if columns of at most ``largest`` ``[..., column]`` could decode to infinity (rule basis-20).

    ``matrices`` are ``[..., column, channel]``. Unless it is None, ``mean`` ``[..., channel]`` is added to the decoded channels. ``name``
    describes the matrices in messages.
    """
    reach = (largest.to(torch.float64)[..., None] * matrices.to(torch.float64).abs()).sum(-2)
    reach = reach if mean is None else reach + mean.to(torch.float64).abs()
    result = float(reach.max())
    if not result <= MAX_DECODED:
        raise ValueTooLarge(
            f"with {name}, a channel could decode to {result:.6g}, but the limit is {MAX_DECODED:.6g}. This basis can decode values, "
            "but not encode them: run kvpack calibrate to make another one, without rescaling the model's values"
        )
