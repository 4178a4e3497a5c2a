"""``PageBuffer``: an engine's own memory, with arbitrary strides, viewed as slots that each contain a page.

The search for strided tensors that share bytes uses sizes and strides, without comparing all addresses. Two values of tensors A and B begin
at p + Σ a_k·s_k and q + Σ b_k·t_k. They share bytes if bounded integers a and b bring these addresses within an item of each other. The
search starts with the largest stride, because the range of the smaller strides then leaves few choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from kvpack.formats.arguments import as_integer, as_list, check_flag, describe
from kvpack.formats.errors import InvalidParameter, InvalidType, OutOfBounds

from .geometry import PageGeometry


class PageBuffer:
    """An engine's memory, viewed as slots that each contain a page. Nothing is copied.

    ``k`` and ``v`` are lists of tensors ``[slot, head, token, channel]``, one per layer, or one tensor ``[slot, layer, head, token,
    channel]`` each. ``v`` is None for pages without values. Tensors may have arbitrary strides. Raises InvalidParameter or InvalidType if
    the tensors do not match ``geometry``.
    """

    def __init__(self, geometry: PageGeometry, k: Any, v: Any = None) -> None:
        if not isinstance(geometry, PageGeometry):
            raise InvalidType(f"geometry is {describe(geometry)}, expected a kvpack.pages.PageGeometry")
        self.geometry = geometry
        given = {"k": k} if v is None else {"k": k, "v": v}
        if set(given) != set(geometry.dims):
            raise InvalidParameter(
                f"the geometry has {' and '.join(geometry.dims)}, but tensors for {' and '.join(given)} were passed: pass tensors for "
                "exactly the geometry's sides"
            )
        self.sides: dict[str, tuple[torch.Tensor, ...]] = {}
        for side, x in given.items():
            layers = list(x.unbind(1)) if isinstance(x, torch.Tensor) and x.dim() == 5 else x
            if not isinstance(layers, Sequence) or len(layers) != geometry.layers:
                description = f"has shape {list(x.shape)}" if isinstance(x, torch.Tensor) else f"is a {type(x).__name__}"
                raise InvalidParameter(
                    f"{side} {description}, expected one tensor [slot, layer, head, token, channel] of {geometry.layers} layers, or a list "
                    f"of {geometry.layers} tensors [slot, head, token, channel]"
                )
            for number, tensor in enumerate(layers):
                self._check(f"layers[{number}].{side}", tensor, geometry.dims[side])
            self.sides[side] = tuple(tensor.detach() for tensor in layers)
        every = [tensor for tensors in self.sides.values() for tensor in tensors]
        self.slots, self.device = every[0].shape[0], every[0].device
        for tensor in every:
            if tensor.shape[0] != self.slots or tensor.device != self.device:
                raise InvalidParameter(
                    f"the first tensor of the PageBuffer has {self.slots} slots on {self.device}, but another has {tensor.shape[0]} on "
                    f"{tensor.device}: all tensors must have the same number of slots and be on the same device"
                )

    def checked_slots(self, slots: Sequence[int], written: bool = False) -> list[int]:
        """Return ``slots`` as Python integers. Raises the same errors as the function ``checked_slots``.

        Also raises InvalidParameter if the slots will be ``written`` and some values share memory.
        """
        check_flag(written, "written")
        if written and self._shared:
            raise InvalidParameter(f"{self._shared}, so pages cannot be written: use tensors in which no values share memory")
        return checked_slots(slots, self.slots, written)

    @cached_property
    def _shared(self) -> str:
        """A description of values that share memory, as in an expanded tensor, for messages. It is an empty string if there are none."""
        names = [f"layers[{number}].{side}" for side, tensors in self.sides.items() for number in range(len(tensors))]
        tensors = [tensor for tensors in self.sides.values() for tensor in tensors]
        shared = find_overlap([_strided(tensor) for tensor in tensors]) if self.slots else None
        if shared is None:
            return ""
        first, other = shared
        shape, strides = list(tensors[first].shape), list(tensors[first].stride())
        if first == other:
            return f"{names[first]}: values share memory (shape {shape}, strides {strides})"
        return f"{names[first]} and {names[other]} share memory (shapes {shape} and {list(tensors[other].shape)})"

    def _check(self, where: str, x: Any, dim: int) -> None:
        geometry = self.geometry
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_meta:
            description = f"a {x.layout} tensor on {x.device}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            raise InvalidType(f"{where} is {description}, expected a dense tensor in memory")
        if x.dtype != geometry.torch_dtype:
            raise InvalidType(f"{where} has dtype {x.dtype}, expected {geometry.dtype}")
        expected = (geometry.heads, geometry.tokens, dim)
        if x.dim() != 4 or tuple(x.shape[1:]) != expected:
            raise InvalidParameter(f"{where} has shape {list(x.shape)}, expected [slot, {', '.join(map(str, expected))}]")


def _strided(x: torch.Tensor) -> Strided:
    item = x.element_size()
    axes = ((size, stride * item) for size, stride in zip(x.shape, x.stride(), strict=True))
    return Strided(x.data_ptr(), item, tuple(axis for axis in axes if axis[0] > 1))


def checked_slots(slots: Sequence[int], count: int, written: bool) -> list[int]:
    """Return ``slots`` as Python integers. Adding narrower integers to addresses would overflow.

    Raises OutOfBounds if a slot is not from 0 to ``count`` - 1. Raises InvalidParameter if a slot is not an integer or, if the slots will
    be ``written``, is repeated.
    """
    result = [as_integer(slot, "a slot") for slot in as_list(slots, "slots", "slots, which are integers")]
    for slot in result:
        if not 0 <= slot < count:
            raise OutOfBounds(f"slot {slot} was passed, but the buffer has {count} slots")
    if written and len(set(result)) < len(result):
        twice = next(slot for slot in result if result.count(slot) > 1)
        raise InvalidParameter(f"slot {twice} was passed {result.count(twice)} times, but a slot holds one page: pass each slot once")
    return result


_MAX_STEPS = 10_000
"""Maximum number of steps in a search. Real layouts need a few dozen."""


class Strided(NamedTuple):
    """A strided array of items with ``item`` bytes each. The first item is at address ``begin``.

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
    # One of two items has the smaller index on the largest axis where they differ. Call it the first.
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
    """Combine tensors of equal shape and spacing, such as the layers of a pool, into one tensor. Returns None if that is impossible."""
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
    """Return True if some Σ c·stride is less than ``item`` away from ``target``. Each c is from low to high.

    ``terms`` contains a (low, high, stride) triple for each c. Also returns True if a bounded search cannot rule it out.
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
