"""Selection of the best codecs for a budget, assuming that the losses of tensors (the keys or values of one layer) add up."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from kvpack.formats.errors import InvalidParameter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .allocation import Allocation, TensorKey
    from .candidates import PackedCandidates

Losses = dict["TensorKey", dict[str, float]]
"""Loss of each tensor with each codec that it can use."""

Point = tuple[int, float, str]
"""Bytes, loss and codec of one choice for a tensor."""


def allocate(candidates: PackedCandidates, losses: Losses, budget: int) -> Allocation:
    """Return the allocation with the smallest total loss for a file of at most ``budget`` bytes.

    Each tensor starts with its smallest codec. Steps to larger codecs are taken in descending order of the loss that they save per byte, as
    long as they fit the budget (Lagrangian bit allocation: Shoham and Gersho, 1988). The remaining bytes are used for any codec that still
    fits. Raises InvalidParameter if the smallest file exceeds the budget.
    """
    hulls = {
        tensor_key: convex_hull((candidates.stream_bytes(tensor_key, codec), loss, codec) for codec, loss in tensor_losses.items())
        for tensor_key, tensor_losses in losses.items()
    }
    chosen = {tensor_key: points[0][2] for tensor_key, points in hulls.items()}
    smallest = candidates.file_bytes(chosen)
    if smallest > budget:
        bits = 8 / candidates.values()
        raise InvalidParameter(
            f"with these candidates, a file of {candidates.length.tokens:,} tokens has at least {smallest:,} bytes "
            f"({smallest * bits:.3f} bits per value), but the budget is {budget:,} bytes ({budget * bits:.3f} bits per value): raise --bits"
        )
    steps = [(_step_sort_key(points, 1), tensor_key, 1) for tensor_key, points in hulls.items() if len(points) > 1]
    heapq.heapify(steps)
    while steps:
        _, tensor_key, number = heapq.heappop(steps)
        points = hulls[tensor_key]
        candidate = chosen | {tensor_key: points[number][2]}
        if candidates.file_bytes(candidate) > budget:
            continue
        chosen = candidate
        if number + 1 < len(points):
            heapq.heappush(steps, (_step_sort_key(points, number + 1), tensor_key, number + 1))
    return _spend_remaining(candidates, losses, budget, chosen)


def _spend_remaining(candidates: PackedCandidates, losses: Losses, budget: int, allocation: Allocation) -> Allocation:
    while True:
        left = budget - candidates.file_bytes(allocation)
        gains = sorted(
            (loss - losses[tensor_key][allocation[tensor_key]], tensor_key, codec)
            for tensor_key, codec_losses in losses.items()
            for codec, loss in codec_losses.items()
            if loss < losses[tensor_key][allocation[tensor_key]]
            and candidates.stream_bytes(tensor_key, codec) - candidates.stream_bytes(tensor_key, allocation[tensor_key]) <= left
        )
        fitting = (allocation | {tensor_key: codec} for _, tensor_key, codec in gains)
        better = next((candidate for candidate in fitting if candidates.file_bytes(candidate) <= budget), None)
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
