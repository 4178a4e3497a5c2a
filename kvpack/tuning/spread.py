"""Extension of key statistics to all positions of a context, from windows that start at position 0.

RoPE rotates keys and queries by their position. Slow channel pairs rotate only a little within a window, so their statistics hold only for
the window's positions. Scores depend on differences of positions, so at other positions keys and queries are the same, but rotated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.frames import Rope

    from .statistics import KeyMoments, Statistics

MAX_STARTS = 16
"""Maximum number of start positions over which windows are averaged."""

_ROTATED_MOMENTS = ("keys", "queries", "pages")
"""Names of the second moments of keys and queries after RoPE."""


def window_positions(tokens: int, positions: int) -> list[int]:
    """Return start positions of windows of ``tokens`` tokens that cover about ``positions`` positions, ascending from 0."""
    count = min(MAX_STARTS, max(1, round(positions / tokens)))
    return [0] if count == 1 else [round(number * (positions - tokens) / (count - 1)) for number in range(count)]


def spread_moments(statistics: KeyMoments, rope: Rope | None, starts: Sequence[int]) -> KeyMoments:
    """Average a layer's moments over windows that start at ``starts``. Without ``rope``, they are returned unchanged."""
    if rope is None:
        return statistics
    rotations = _rotations(rope, statistics.keys.shape[-1], starts)
    return replace(statistics, **{name: _average_rotated(getattr(statistics, name), rotations) for name in _ROTATED_MOMENTS})


def spread_keys(statistics: Statistics, ropes: Sequence[Rope | None], starts: Sequence[int]) -> Statistics:
    """Average the statistics of keys over windows that start at ``starts``. The samples are of a single window."""
    sums, products, costs, samples = dict(statistics.sums), dict(statistics.products), dict(statistics.costs), dict(statistics.samples)
    for layer, rope in enumerate(ropes):
        name = f"{layer}.k"
        if rope is None or name not in sums:
            continue
        rotations = _rotations(rope, sums[name].shape[-1], starts)
        sums[name] = sums[name] @ rotations.mean(0)
        products[name], costs[name] = _average_rotated(products[name], rotations), _average_rotated(costs[name], rotations)
        samples[name] = [part @ rotations[number % len(rotations)].to(part.dtype) for number, part in enumerate(samples[name])]
    return replace(statistics, sums=sums, products=products, costs=costs, samples=samples)


def _rotations(rope: Rope, dim: int, starts: Sequence[int]) -> torch.Tensor:
    """Return the matrices ``[start, dim, dim]``, float64, that rotate a row of channels to the positions ``starts``."""
    # Each unit vector is its own sequence, because tokens of one sequence are at consecutive positions.
    units = torch.eye(dim, dtype=torch.float32, device="cpu")[:, None]
    return torch.stack([rope.rotate(units, start)[:, 0] for start in starts]).to(torch.float64)


def _average_rotated(moments: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Return the average second moments ``[..., dim, dim]`` of rows multiplied by each of ``rotations``."""
    return (rotations.mT @ moments[..., None, :, :] @ rotations).mean(-3)
