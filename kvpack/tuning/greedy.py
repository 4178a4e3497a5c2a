"""Selection of the best codecs for a budget, assuming that the losses of tensors (the keys or values of one layer) add up."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .allocation import Allocation, Place
    from .candidates import PackedCandidates

Losses = dict["Place", dict[str, float]]
"""Loss of each tensor with each codec that it can use."""

Point = tuple[int, float, str]
"""Bytes, loss and codec of one choice for a tensor."""


def allocate(priced: PackedCandidates, losses: Losses, budget: int) -> Allocation:
    """Return the allocation with the smallest total loss for a file of at most ``budget`` bytes.

    Each tensor starts with its smallest codec. Steps to larger codecs are taken in descending order of the loss that they save per byte, as
    long as they fit the budget (Lagrangian bit allocation: Shoham and Gersho, 1988). The remaining bytes are used for any codec that still
    fits. Raises InvalidParameter if the smallest file exceeds the budget.
    """
    hulls = {
        place: convex_hull((priced.stream_bytes(place, codec), loss, codec) for codec, loss in place_losses.items())
        for place, place_losses in losses.items()
    }
    chosen = {place: points[0][2] for place, points in hulls.items()}
    smallest = priced.file_bytes(chosen)
    if smallest > budget:
        bits = 8 / priced.values()
        raise InvalidParameter(
            f"with these candidates, a file of {priced.length.tokens:,} tokens has at least {smallest:,} bytes "
            f"({smallest * bits:.3f} bits per value), but the budget is {budget:,} bytes ({budget * bits:.3f} bits per value): raise --bits"
        )
    steps = [(_step_sort_key(points, 1), place, 1) for place, points in hulls.items() if len(points) > 1]
    heapq.heapify(steps)
    while steps:
        _, place, number = heapq.heappop(steps)
        points = hulls[place]
        candidate = chosen | {place: points[number][2]}
        if priced.file_bytes(candidate) > budget:
            continue
        chosen = candidate
        if number + 1 < len(points):
            heapq.heappush(steps, (_step_sort_key(points, number + 1), place, number + 1))
    return _spend_remaining(priced, losses, budget, chosen)


def _spend_remaining(priced: PackedCandidates, losses: Losses, budget: int, allocation: Allocation) -> Allocation:
    while True:
        left = budget - priced.file_bytes(allocation)
        gains = sorted(
            (loss - losses[place][allocation[place]], place, codec)
            for place, codec_losses in losses.items()
            for codec, loss in codec_losses.items()
            if loss < losses[place][allocation[place]]
            and priced.stream_bytes(place, codec) - priced.stream_bytes(place, allocation[place]) <= left
        )
        fitting = (allocation | {place: codec} for _, place, codec in gains)
        better = next((candidate for candidate in fitting if priced.file_bytes(candidate) <= budget), None)
        if better is None:
            return allocation
        allocation = better


def convex_hull(points: Iterable[Point]) -> list[Point]:
    """Return the lower convex hull of the points, from the fewest bytes to the smallest loss.

    Each step decreases the loss by less per byte than the previous one.
    """
    kept: list[Point] = []
    for point in sorted(points):
        if kept and (point[1] >= kept[-1][1] or point[0] == kept[-1][0]):
            continue
        while len(kept) > 1 and _loss_decrease_per_byte(kept[-2], kept[-1]) <= _loss_decrease_per_byte(kept[-2], point):
            kept.pop()
        kept.append(point)
    return kept


def _loss_decrease_per_byte(first: Point, second: Point) -> float:
    return (first[1] - second[1]) / (second[0] - first[0])


def _step_sort_key(points: list[Point], index: int) -> float:
    return -_loss_decrease_per_byte(points[index - 1], points[index])
