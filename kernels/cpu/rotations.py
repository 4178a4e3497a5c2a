"""Rotations in the form that C applies: a Sylvester Hadamard factor, a Paley matrix, and a factor per channel of the original frame."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from kvpack.formats.columns import is_power_of_two
from kvpack.formats.rotation import PALEY_ORDERS, Rotation, hadamard

from . import library

_CACHE_SIZE = 64


class RotationDescription(NamedTuple):
    """C description of a rotation, and the tensors to which ``struct`` points."""

    struct: library.Rotation
    keep_alive: tuple[torch.Tensor, ...]


NO_ROTATION = RotationDescription(library.Rotation(), ())


@lru_cache(_CACHE_SIZE)
def describe(rotation: Rotation) -> RotationDescription:
    if rotation.kind == "none":
        return NO_ROTATION
    order = next(p for p in (1, *PALEY_ORDERS) if rotation.dim % p == 0 and is_power_of_two(rotation.dim // p))
    paley = torch.tensor(hadamard(order), dtype=torch.float32, device="cpu")
    first = torch.tensor(hadamard(rotation.dim)[0], dtype=torch.float32, device="cpu")
    factors = (rotation.matrix()[0] * first).contiguous()
    return RotationDescription(library.Rotation(order, paley.data_ptr(), factors.data_ptr()), (paley, factors))
