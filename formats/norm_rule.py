"""The option norm_rule: how an encoder chooses the stored factor of a token; decoders do not depend on it.

A codec of directions decodes a token x to a factor times a direction d, the sum of its codes. Papers store x's norm as the factor
("norm"). That keeps the error small, but d, the direction nearest to x's, is too short along x: every product with x, and every
attention score, shrinks. The factor |x|^2 / <x, d> ("unbiased") makes <x, decoded x> = |x|^2 at the same size; after a random rotation
the expected decoded token is x. Source: RaBitQ (Gao and Long 2024, arXiv 2405.12497), Theorem 3.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import torch
from .token_norms import LARGEST_STORED, LIMITS

if TYPE_CHECKING:
    from .options import Options
    from .rotation import Rotation

NORM_RULES = ("unbiased", "norm")
"""The default, and the rule of the papers."""

SKETCHED_NORM_RULE = "norm"
"""The default for a codec whose residual is sketched: the sketch makes products unbiased, the better the smaller the residual is."""

_SMALLEST_NORMAL = 2.0**-126


def read_norm_rule(options: Options) -> str:
    """Return the rule that a recipe requests."""
    return options.choice("norm_rule", SKETCHED_NORM_RULE if options.sketched else NORM_RULES[0], NORM_RULES)


def normalize_rows(rows: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate rows ``[row, dim]`` into the frame of ``rotation`` and normalize them; return float32 unit rows and their norms ``[row]``.

    A subnormal norm leaves a row shorter than 1.
    """
    # In binary64 no square overflows or underflows.
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float64).to(torch.float32)
    return rotation.forward(rows) * norm.clamp(min=_SMALLEST_NORMAL).reciprocal_(), norm[:, 0]


def unbiased_norm(norm: torch.Tensor, unit: torch.Tensor, decoded: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return ``unbiased_factor`` for rows of ``norm`` whose ``normalize_rows`` decode to ``decoded`` ``[row, dim]``."""
    product = (unit * decoded).sum(-1) / (norm / norm.clamp(min=_SMALLEST_NORMAL))
    return unbiased_factor(norm, product, decoded.square().sum(-1), dtype)


def unbiased_factor(
    norm: torch.Tensor, product: torch.Tensor, decoded: torch.Tensor, dtype: str, squares: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """Return the factor to store as ``dtype`` (a key of ``LIMITS``) for rows x = ``norm`` u, where u decodes to d.

    ``product`` is <u, d>, ``decoded`` |d|^2 and ``squares`` |u|^2, in the shape of ``norm``. Rows more than 45 degrees away from d keep
    their norm, because the error of the larger factor would exceed the row; so do zeros, and norms that do not fit. If the norm fits but
    the factor does not, the factor becomes the largest number.
    """
    kept = (product > 0) & (squares * decoded <= 2 * product.square()) & (norm < LIMITS[dtype])
    return torch.where(kept, (norm * (squares / product)).clamp_max(LARGEST_STORED[dtype]), norm)
