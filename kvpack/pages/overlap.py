"""Detection of strided tensors whose values share bytes, computed from sizes and strides instead of comparing all addresses.

Two values of tensors A and B begin at p + Σ a_k·s_k and q + Σ b_k·t_k. They share bytes if bounded integers a and b bring these addresses
within an item of each other. The search starts with the largest stride, because the range of the smaller strides then leaves few choices.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

_MAX_STEPS = 10_000
"""Maximum number of steps in a search. Real layouts need a few dozen."""


class Strided(NamedTuple):
    """A strided array whose items have ``item`` bytes each. The first item is at address ``begin``.

    ``axes`` contains a (size, stride in bytes) pair for each axis. Sizes are at least 2, and strides at least 0.
    """

    begin: int
    item: int
    axes: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        return self.begin + sum((size - 1) * stride for size, stride in self.axes) + self.item


def overlaps_itself(x: Strided) -> bool:
    """Return True if two items of ``x`` share bytes. Also returns True if a bounded search cannot rule it out."""
    # One of two items has the smaller index on the largest axis where they differ; call it the first.
    axes = sorted(x.axes, key=lambda axis: -axis[1])
    for number, (size, stride) in enumerate(axes):
        rest = [(-(size - 1), size - 1, stride) for size, stride in axes[number + 1 :]]
        if _can_reach([(1, size - 1, stride), *rest], 0, x.item):
            return True
    return False


def overlaps(x: Strided, y: Strided) -> bool:
    """Return True if an item of ``x`` and an item of ``y`` share bytes. Also returns True if a bounded search cannot rule it out."""
    if x.end <= y.begin or y.end <= x.begin:
        return False
    ranges: dict[int, tuple[int, int]] = {}
    for (size, stride), sign in [*((axis, 1) for axis in x.axes), *((axis, -1) for axis in y.axes)]:
        low, high = ranges.get(stride, (0, 0))
        ranges[stride] = (low, high + size - 1) if sign > 0 else (low - size + 1, high)
    terms = [(low, high, stride) for stride, (low, high) in ranges.items()]
    return _can_reach(sorted(terms, key=lambda term: -term[2]), y.begin - x.begin, max(x.item, y.item))


def find_overlap(tensors: list[Strided]) -> tuple[int, int] | None:
    """Return the indices of two tensors that share bytes, or None. If a tensor overlaps itself, return its index twice."""
    for number, tensor in enumerate(tensors):
        if overlaps_itself(tensor):
            return number, number
    folded = _fold_pools(tensors)
    if folded is not None and not overlaps_itself(folded):
        return None
    order = sorted(range(len(tensors)), key=lambda number: tensors[number].begin)
    for place, number in enumerate(order):
        for other in order[place + 1 :]:
            if tensors[other].begin >= tensors[number].end:
                break
            if overlaps(tensors[number], tensors[other]):
                return min(number, other), max(number, other)
    return None


def _fold_pools(tensors: list[Strided]) -> Strided | None:
    """Combine tensors of equal shape at equal distances, such as the layers of a pool, into one tensor. If that is impossible, return None.
    """
    if len({tensor[1:] for tensor in tensors}) != 1:
        return None
    begins = sorted(tensor.begin for tensor in tensors)
    half = len(begins) // 2
    for parts in (1, 2):
        if len(begins) % parts:
            continue
        # Keys and values alternate, or all keys come before all values.
        for begin_parts in [[begins]] if parts == 1 else [[begins[::2], begins[1::2]], [begins[:half], begins[half:]]]:
            steps = {after - before for part in begin_parts for before, after in pairwise(part)}
            if len(steps) <= 1:
                more = [(len(begin_parts[0]), next(iter(steps), 0)), (parts, begin_parts[-1][0] - begin_parts[0][0])]
                return tensors[0]._replace(begin=begins[0], axes=(*tensors[0].axes, *(axis for axis in more if axis[0] > 1)))
    return None


def _can_reach(terms: list[tuple[int, int, int]], target: int, item: int) -> bool:
    """Return True if some Σ c·stride is less than ``item`` away from ``target``, where c is from low to high for each term.

    Each term is (low, high, stride). Also returns True if a bounded search cannot rule it out.
    """
    below = [(0, 0)]
    for low, high, stride in reversed(terms):
        below.append((below[-1][0] + low * stride, below[-1][1] + high * stride))
    below.reverse()
    steps, open_ = 0, [(0, target)]
    while open_:
        number, left = open_.pop()
        least, greatest = below[number]
        if not least - item < left < greatest + item:
            continue
        if number == len(terms):
            return True
        steps += 1
        if steps > _MAX_STEPS:
            return True
        low, high, stride = terms[number]
        if not stride:
            open_.append((number + 1, left))
            continue
        least, greatest = below[number + 1]
        first = max(low, -((greatest + item - 1 - left) // stride))
        last = min(high, (left - least + item - 1) // stride)
        if last - first > _MAX_STEPS:
            return True
        open_ += [(number + 1, left - count * stride) for count in range(first, last + 1)]
    return False
