"""Fitting of balanced frames to calibration statistics (spec/writers.md, Calibration), and the estimated benefit of more text."""

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
"""Fraction of the mean second moment that is added to each channel's, because calibration sees only a sample of keys and queries."""


def fit_balanced_keys(
    moments_by_layer: Sequence[KeyMoments], ropes: Sequence[Rope | None] | None, progress: Progress | None = None
) -> dict[int, BalancedKeys]:
    """Return the balanced frames of each layer. ``progress`` counts layers.

    ``ropes`` contains the RoPE of each layer's keys. If it is None, the means of keys before RoPE are omitted.
    """
    fitted = {}
    for layer, moments in enumerate(moments_by_layer):
        queries = moments.queries / moments.rows
        fitted[layer] = BalancedKeys(
            balancing_frames(moments.keys / moments.tokens, queries).to(torch.float32),
            balancing_frames(moments.pages / moments.tokens, queries).to(torch.float32),
            queries.to(torch.float32),
            None if ropes is None else (moments.keys_before_rope / moments.tokens).to(torch.float32),
            None if ropes is None else ropes[layer],
        )
        if progress:
            progress(layer + 1, len(moments_by_layer))
    return fitted


def balancing_frames(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return frames ``[kv_head, column, channel]`` for second moments of keys and queries, float64 ``[kv_head, dim, dim]``.

    In such a frame, keys and queries have the same diagonal second moments, in descending order. The mean square norm of a frame's rows is
    1.
    """
    root = torch.linalg.cholesky(_add_ridge(keys))
    shared, vectors = torch.linalg.eigh(root.mT @ _add_ridge(queries) @ root)
    # The rows of the transpose of L U Lambda^(-1/4), which is the inverse of Lambda^(1/4) U^T L^-1.
    frames: torch.Tensor = (root @ vectors * shared.clamp_min(torch.finfo(shared.dtype).tiny).pow(-0.25)[:, None]).mT.flip(1)
    return frames.div_(frames.square().sum(2).mean(1).sqrt()[:, None, None])


def frame_cost(frames: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return the cost of an isotropic error in the frames, relative to encoding without frames, ``[kv_head]``.

    The error is proportional to the size of keys in the frame, and its cost is proportional to the size of queries.
    """
    inverse = torch.linalg.inv(frames)
    cost = _trace(inverse.mT @ keys @ inverse) * _trace(frames @ queries @ frames.mT)
    return cost / (_trace(keys) * _trace(queries))


def compare_halves(halves: Sequence[tuple[KeyMoments, KeyMoments]]) -> dict[str, float] | None:
    """Fit frames to half of the text, and return their mean ``frame_cost`` on the same half ("own") and on the other half ("other").

    Costs are averaged over layers and heads. A basis's own frames are fitted to both halves. Returns None if a half is empty.
    """
    own_costs, other = [], []
    for pair in halves:
        if not all(half.tokens for half in pair):
            return None
        moments = [(half.keys / half.tokens, half.queries / half.rows) for half in pair]
        frames = [balancing_frames(*half) for half in moments]
        own_costs += [frame_cost(frame, *half) for frame, half in zip(frames, moments, strict=True)]
        other += [frame_cost(frame, *half) for frame, half in zip(frames, reversed(moments), strict=True)]
    return {"own": float(torch.cat(own_costs).mean()), "other": float(torch.cat(other).mean())}


def _add_ridge(moments: torch.Tensor) -> torch.Tensor:
    """Add ``RIDGE`` times the mean second moment to each channel's second moment, so that none is zero."""
    mean = moments.diagonal(dim1=1, dim2=2).mean(1)
    ridge = torch.where(mean > 0, RIDGE * mean, 1.0)
    return moments + ridge[:, None, None] * torch.eye(moments.shape[1], dtype=moments.dtype, device=moments.device)


def _trace(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.diagonal(dim1=1, dim2=2).sum(1)
