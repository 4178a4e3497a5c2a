"""The option norm_rule: how an encoder chooses the factor stored for a token. Decoders do not depend on it.

A codec of directions decodes a token x to a factor times a direction d, which its codes describe. Papers store the norm of x as the factor
("norm"). The error is then small, but since d only approximates the direction of x, every product with x shrinks, and with it every
attention score. The factor |x|^2 / <x, d> ("unbiased") makes <x, decoded x> = |x|^2 without storing more bits. After a random rotation, the
expected decoded token is x. Source: RaBitQ (Gao and Long 2024, arXiv 2405.12497), Theorem 3.2.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .lazy import torch
from .token_norms import LIMITS, MAX_STORED, norms_per_head

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .base import Codec
    from .options import Options
    from .rotation import Rotation

NORM_RULES = ("unbiased", "norm")
"""The supported norm rules: first the default, then the rule that papers use."""

SKETCHED_NORM_RULE = "norm"
"""Default rule for a codec with a sketched residual. The sketch already makes products unbiased, and works best with a small residual."""

_MIN_NORMAL = 2.0**-126

_SPREADS = (1.75, 1.9, 2.3, 3.1, 4.2, 6.0, 7.5, 9.0)
"""Values of ``error_spread`` for 1, 2, ... bits per value and 64 channels."""

_USUAL_ERROR = 1.6
"""Typical relative error of directions, times 2^(bits per value)."""


def read_norm_rule(options: Options) -> str:
    """Return the norm rule that a recipe requests."""
    return options.choice("norm_rule", SKETCHED_NORM_RULE if options.sketched else NORM_RULES[0], NORM_RULES)


def error_spread(bits: float, dim: int) -> float:
    """Return the relative error, divided by the typical one, that fewer than 1 in 60,000 tokens of random direction exceed.

    With more bits, the error of a coordinate beyond the last level grows relative to the other errors. With more channels, such a
    coordinate matters less. Measured for scalar, octahedral, polar, angle and quaternion with 16 to 128 channels.
    """
    index = min(max(math.ceil(bits), 1), len(_SPREADS)) - 1
    return _SPREADS[index] * math.sqrt(math.sqrt(64 / dim))


def typical_error(bits: float) -> float:
    """Return the typical error, relative to the norm, of a codec that stores directions with ``bits`` bits per value."""
    error: float = _USUAL_ERROR * 2.0**-bits
    return error


def relative_errors(codec: Codec, streams: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the norm of each token's error divided by the token's norm, float32 ``[batch, kv_head, token]``.

    The error is the difference between the decoded ``streams`` and ``x`` ``[batch, kv_head, token, dim]``. Tokens of zeros have the error
    0.
    """
    return (norms_per_head(codec.decode(streams).sub_(x)) / norms_per_head(x)).nan_to_num_(0.0, posinf=0.0)


def normalize_rows(rows: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate rows ``[row, dim]`` by ``rotation``, and normalize them. Returns float32 unit rows and their norms ``[row]``.

    A row with a subnormal norm stays shorter than 1.
    """
    # In binary64 no square overflows or underflows.
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64).to(torch.float32)
    return rotation.forward(rows) * norm.clamp(min=_MIN_NORMAL).reciprocal_(), norm[:, 0]


def unbiased_norm(norm: torch.Tensor, unit: torch.Tensor, decoded: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return ``unbiased_factor`` for unit rows and norms from ``normalize_rows``. ``decoded`` ``[row, dim]`` are the decoded rows."""
    product = (unit * decoded).sum(-1) / (norm / norm.clamp(min=_MIN_NORMAL))
    return unbiased_factor(norm, product, decoded.square().sum(-1), dtype)


def unbiased_factor(
    norm: torch.Tensor, product: torch.Tensor, decoded: torch.Tensor, dtype: str, squares: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """Return the factor to store as ``dtype`` (a key of ``LIMITS``) for rows x = ``norm`` u, where u decodes to d.

    ``product`` is <u, d>, ``decoded`` is |d|^2 and ``squares`` is |u|^2, in the shape of ``norm``. Three kinds of rows keep their norm:
    zeros, norms that do not fit the dtype, and rows more than 45 degrees from d. With the larger factor, the error of such a row would
    exceed the row itself. If the norm fits but the factor does not, the factor is the largest number of the dtype.
    """
    is_usable = (product > 0) & (squares * decoded <= 2 * product.square()) & (norm < LIMITS[dtype])
    return torch.where(is_usable, (norm * (squares / product)).clamp_max(MAX_STORED[dtype]), norm)
