"""Rotations as C applies them: Sylvester's factor, Paley's matrix, and a factor per channel of the original frame."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.formats.columns import is_power_of_two
from kvpack.formats.rotation import PALEY_ORDERS, hadamard

from . import library

if TYPE_CHECKING:
    from kvpack.formats.rotation import Rotation

_KEPT = 64


class Described(NamedTuple):
    """A rotation as C sees it, and the tensors that must live as long as ``struct``."""

    struct: library.Rotation
    kept: tuple[torch.Tensor, ...]


NONE = Described(library.Rotation(), ())


@lru_cache(_KEPT)
def described(rotation: Rotation) -> Described:
    """Return the C description of ``rotation``."""
    if rotation.kind == "none":
        return NONE
    order = next(p for p in (1, *PALEY_ORDERS) if rotation.dim % p == 0 and is_power_of_two(rotation.dim // p))
    paley = torch.tensor(hadamard(order), dtype=torch.float32, device="cpu")
    first = torch.tensor(hadamard(rotation.dim)[0], dtype=torch.float32, device="cpu")
    factors = (rotation.matrix()[0] * first).contiguous()
    return Described(library.Rotation(order, paley.data_ptr(), factors.data_ptr()), (paley, factors))
