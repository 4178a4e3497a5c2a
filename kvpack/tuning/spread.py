"""Statistics of keys over all positions of a context, from windows that begin at position 0.

RoPE rotates keys and queries by their position. Its slow channel pairs rotate only a little within a window, so their statistics hold only
for the positions of the window. Scores depend on position differences: at other positions, keys and queries are the same, rotated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.frames import Rope

    from .statistics import KeyMoments, Statistics

MOST = 16
"""Maximum number of places where windows are counted."""

_TURNED = ("keys", "queries", "pages")
"""The second moments of keys and queries after RoPE."""


def places_of(tokens: int, positions: int) -> list[int]:
    """Return the starts of windows of ``tokens`` tokens that cover about ``positions`` positions, ascending from 0."""
    count = min(MOST, max(1, round(positions / tokens)))
    return [0] if count == 1 else [round(number * (positions - tokens) / (count - 1)) for number in range(count)]


def spread_moments(found: KeyMoments, rope: Rope | None, places: Sequence[int]) -> KeyMoments:
    """Average the moments of a layer over windows that begin at ``places``; return them unchanged without ``rope``."""
    if rope is None:
        return found
    turns = _turns(rope, found.keys.shape[-1], places)
    return replace(found, **{name: _turned(getattr(found, name), turns) for name in _TURNED})


def spread_keys(found: Statistics, ropes: Sequence[Rope | None], places: Sequence[int]) -> Statistics:
    """Average the statistics of keys over windows that begin at ``places``; the samples of a window are at one of them."""
    sums, products, costs, samples = dict(found.sums), dict(found.products), dict(found.costs), dict(found.samples)
    for layer, rope in enumerate(ropes):
        name = f"{layer}.k"
        if rope is None or name not in sums:
            continue
        turns = _turns(rope, sums[name].shape[-1], places)
        sums[name] = sums[name] @ turns.mean(0)
        products[name], costs[name] = _turned(products[name], turns), _turned(costs[name], turns)
        samples[name] = [part @ turns[number % len(turns)].to(part.dtype) for number, part in enumerate(samples[name])]
    return replace(found, sums=sums, products=products, costs=costs, samples=samples)


def _turns(rope: Rope, dim: int, places: Sequence[int]) -> torch.Tensor:
    """Return the matrices ``[place, dim, dim]``, float64, that rotate a row of channels to the positions ``places``."""
    # Tokens of one sequence are at consecutive positions: each unit vector is a sequence of its own.
    units = torch.eye(dim, dtype=torch.float32, device="cpu")[:, None]
    return torch.stack([rope.rotate(units, place)[:, 0] for place in places]).to(torch.float64)


def _turned(moments: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return the average second moments ``[..., dim, dim]`` of rows multiplied by each of ``turns``."""
    return (turns.mT @ moments[..., None, :, :] @ turns).mean(-3)
