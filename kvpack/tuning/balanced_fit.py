"""Compute balanced frames from calibration statistics (spec/writers.md, Calibration), and what more text would change in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpack.coding.bases import BalancedKeys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.coding.encoding import Progress
    from kvpack.formats.frames import Rope

    from .statistics import KeyMoments

RIDGE = 1e-3
"""Share of the mean second moment that is added to each channel's, because a calibration sees only part of the keys and queries."""


def balanced_of_all(
    found: Sequence[KeyMoments], ropes: Sequence[Rope | None] | None, progress: Progress | None = None
) -> dict[int, BalancedKeys]:
    """Return the balanced frames of every layer, and their means before RoPE if the rotation of keys is known.

    ``progress`` counts the layers.
    """
    fitted = {}
    for layer, moments in enumerate(found):
        queries = moments.queries / moments.rows
        fitted[layer] = BalancedKeys(
            frames_of(moments.keys / moments.tokens, queries).to(torch.float32),
            frames_of(moments.pages / moments.tokens, queries).to(torch.float32),
            queries.to(torch.float32),
            None if ropes is None else (moments.unturned / moments.tokens).to(torch.float32),
            None if ropes is None else ropes[layer],
        )
        if progress:
            progress(layer + 1, len(found))
    return fitted


def frames_of(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return the frames ``[kv_head, column, channel]`` of keys and queries with these second moments, float64 ``[kv_head, dim, dim]``.

    In a frame both have the same diagonal second moments, largest first. Its rows have a mean square length of 1.
    """
    root = torch.linalg.cholesky(_ridged(keys))
    shared, turned = torch.linalg.eigh(root.mT @ _ridged(queries) @ root)
    # Rows of the transpose of L U Lambda^(-1/4), the inverse of Lambda^(1/4) U^T L^-1.
    frames: torch.Tensor = (root @ turned * shared.clamp_min(torch.finfo(shared.dtype).tiny).pow(-0.25)[:, None]).mT.flip(1)
    return frames.div_(frames.square().sum(2).mean(1).sqrt()[:, None, None])


def cost_of(frames: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return the cost of an error of equal size in all directions of the frames, ``[kv_head]``, relative to one without frames.

    The error is proportional to the size of keys in the frame, and its cost per unit to that of queries.
    """
    inverse = torch.linalg.inv(frames)
    cost = _trace(inverse.mT @ keys @ inverse) * _trace(frames @ queries @ frames.mT)
    return cost / (_trace(keys) * _trace(queries))


def gain_of_more_text(halves: Sequence[tuple[KeyMoments, KeyMoments]]) -> dict[str, float] | None:
    """Return the cost of frames fitted to half of the text, on that half (``own``) and on the other (``other``); None without two halves.

    Costs are those of ``cost_of``, averaged over layers and heads. The frames of a basis are fitted to both halves.
    """
    own_costs, other = [], []
    for pair in halves:
        if not all(half.tokens for half in pair):
            return None
        moments = [(half.keys / half.tokens, half.queries / half.rows) for half in pair]
        frames = [frames_of(*half) for half in moments]
        own_costs += [cost_of(frame, *given) for frame, given in zip(frames, moments, strict=True)]
        other += [cost_of(frame, *given) for frame, given in zip(frames, reversed(moments), strict=True)]
    return {"own": float(torch.cat(own_costs).mean()), "other": float(torch.cat(other).mean())}


def _ridged(moments: torch.Tensor) -> torch.Tensor:
    """Add to the second moments of each channel, so that none is zero."""
    mean = moments.diagonal(dim1=1, dim2=2).mean(1)
    ridge = torch.where(mean > 0, RIDGE * mean, 1.0)
    return moments + ridge[:, None, None] * torch.eye(moments.shape[1], dtype=moments.dtype, device=moments.device)


def _trace(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.diagonal(dim1=1, dim2=2).sum(1)
