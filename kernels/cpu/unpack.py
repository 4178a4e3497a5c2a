"""Unpacking on the CPU: packed pages to dense rows, equal to those of ``formats/`` bit for bit wherever no rotation sums."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from . import library, rotations, sides

if TYPE_CHECKING:
    from .sides import Side

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes of dense rows, in the order of ``library.DTYPES``."""

FEWEST_VALUES = 1 << 18
"""Values of a call for each of its threads: below it, starting one costs more than it saves."""

MANY_BYTES = 1 << 22
"""Results of at least this size are in memory of their own, new to the process, for which large pages are asked."""


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
        rotation = rotations.NONE if part.frame is None else rotations.described(side.codec.rotation)
        steps = [stride * out.element_size() for stride in out.stride()[:3]]
        stream = library.Stream(out.data_ptr() + part.start * steps[2], *steps)
        call = library.Unpack(
            batch, heads, part.start, part.stop, part.struct(described), DTYPES.index(out.dtype),
            rotation.struct, stream, threads, level,
        )  # fmt: skip
        if compiled.kvpack_unpack(ctypes.byref(call)):
            raise MemoryError("there is not enough memory for the buffers of unpacking")
