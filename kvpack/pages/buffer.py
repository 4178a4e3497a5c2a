"""PageBuffer: an engine's own memory, with arbitrary strides, viewed as slots that each contain a page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from kvpack.formats.arguments import as_integer, as_list, check_flag, describe
from kvpack.formats.errors import InvalidParameter, InvalidType, OutOfBounds

from .geometry import PageGeometry
from .overlap import Strided, find_overlap


class PageBuffer:
    """An engine's memory, viewed as slots that each contain a page. Nothing is copied.

    ``k`` and ``v`` are lists of tensors ``[slot, head, token, channel]``, one for each layer, or one tensor ``[slot, layer, head, token,
    channel]`` each. ``v`` is None for pages without values. Tensors may have arbitrary strides. Raises InvalidParameter or InvalidType if
    the tensors do not match ``geometry``.
    """

    def __init__(self, geometry: PageGeometry, k: Any, v: Any = None) -> None:
        if not isinstance(geometry, PageGeometry):
            raise InvalidType(f"geometry is {describe(geometry)}, expected a kvpack.pages.PageGeometry")
        self.geometry = geometry
        given = {"k": k} if v is None else {"k": k, "v": v}
        if set(given) != set(geometry.dims):
            raise InvalidParameter(f"the geometry has {' and '.join(geometry.dims)}, but tensors for {' and '.join(given)} were passed")
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
            raise InvalidParameter(f"{self._shared}, so a page cannot be written there: use a tensor in which no values share memory")
        return checked_slots(slots, self.slots, written)

    @cached_property
    def _shared(self) -> str:
        """Describe tensors that share memory, such as an expanded tensor, for messages. If there are none, return an empty string."""
        names = [f"layers[{number}].{side}" for side, tensors in self.sides.items() for number in range(len(tensors))]
        tensors = [tensor for tensors in self.sides.values() for tensor in tensors]
        shared = find_overlap([_strided(tensor) for tensor in tensors]) if self.slots else None
        if shared is None:
            return ""
        first, other = shared
        shape, strides = list(tensors[first].shape), list(tensors[first].stride())
        if first == other:
            return f"{names[first]}: values of its shape {shape} share memory, by strides {strides}"
        return f"{names[first]} and {names[other]}: values of their shapes {shape} and {list(tensors[other].shape)} share memory"

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

    Raises OutOfBounds if a slot is not from 0 to ``count`` - 1, and InvalidParameter if a slot is not an integer or, if the slots will be
    ``written``, is repeated.
    """
    result = [as_integer(slot, "a slot") for slot in as_list(slots, "slots", "slots, which are integers")]
    for slot in result:
        if not 0 <= slot < count:
            raise OutOfBounds(f"slot {slot} was passed, but the buffer has {count} slots")
    if written and len(set(result)) < len(result):
        twice = next(slot for slot in result if result.count(slot) > 1)
        raise InvalidParameter(f"slot {twice} was passed {result.count(twice)} times, but a slot holds one page: pass each slot once")
    return result
