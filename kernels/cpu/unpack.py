"""Unpacking on the CPU: packed pages to dense rows, equal to those of ``formats/`` bit for bit wherever no rotation sums."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kvpack.formats.columns import is_power_of_two
from kvpack.formats.rotation import PALEY_ORDERS, hadamard

from . import library, sides

if TYPE_CHECKING:
    from kvpack.formats.rotation import Rotation

    from .sides import Side

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes of dense rows, in the order of ``library.DTYPES``."""

FEWEST_VALUES = 1 << 18
"""Values of a call for each of its threads: below it, starting one costs more than it saves."""

MANY_BYTES = 1 << 22
"""Results of at least this size are in memory of their own, new to the process, for which large pages are asked."""

_KEPT = 64


def supports(side: Side, dtype: torch.dtype) -> bool:
    """Whether C unpacks ``side``: its codec and strides, no side-cars, and one of ``DTYPES``."""
    parts = sides.parts_of(side) if library.library() is not None and dtype in DTYPES else None
    return parts is not None and not hasattr(side.codec, "side_cars")


def unpack_into(side: Side, out: torch.Tensor, threads: int | None = None, level: int = 0) -> None:
    """Write all tokens of a side that ``supports`` takes to ``out``, contiguous ``[batch, kv_head, token, dim]``, in the original frame.

    ``level`` is a place in ``library.levels()``. Raises MemoryError.
    """
    parts = sides.parts_of(side)
    assert parts is not None
    batch, heads = out.shape[:2]
    most = 1 + out.numel() // FEWEST_VALUES
    threads = min(library.checked_threads(threads, torch.get_num_threads()), most)
    compiled = library.library()
    assert compiled is not None
    if out.nbytes >= MANY_BYTES:
        compiled.kvpack_expect_writes(out.data_ptr(), out.nbytes)
    for part in parts:
        described = part.described()
        rotated = _rotated(side.codec.rotation) if part.frame is not None else None
        order, paley, factors = rotated or (0, None, None)
        steps = [stride * out.element_size() for stride in out.stride()[:3]]
        stream = library.Stream(out.data_ptr() + part.start * steps[2], *steps)
        call = library.Unpack(
            batch, heads, part.start, part.stop, part.struct(described), DTYPES.index(out.dtype), order,
            None if paley is None else paley.data_ptr(), None if factors is None else factors.data_ptr(), stream, threads, level,
        )  # fmt: skip
        if compiled.kvpack_unpack(ctypes.byref(call)):
            raise MemoryError("there is not enough memory for the buffers of unpacking")


@lru_cache(_KEPT)
def _rotated(rotation: Rotation) -> tuple[int, torch.Tensor, torch.Tensor] | None:
    """The order and the matrix of Paley's factor, and what rotated channels are multiplied by; None without a rotation."""
    if rotation.kind == "none":
        return None
    order = next(p for p in (1, *PALEY_ORDERS) if rotation.dim % p == 0 and is_power_of_two(rotation.dim // p))
    paley = torch.tensor(hadamard(order), dtype=torch.float32, device="cpu")
    first = torch.tensor(hadamard(rotation.dim)[0], dtype=torch.float32, device="cpu")
    return order, paley, (rotation.matrix()[0] * first).contiguous()
