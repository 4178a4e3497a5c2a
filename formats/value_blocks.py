"""Block-by-block reading of stored arrays, which checks arrays of any size in bounded memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from .errors import InvalidPayload
from .lazy import numpy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    class StoredArray(Protocol):
        """An array with values that are read on demand, in C order."""

        @property
        def shape(self) -> tuple[int, ...]: ...

        @property
        def dtype(self) -> numpy.dtype[Any]: ...

        def flat(self, start: int, stop: int) -> numpy.ndarray[Any, Any]:
            """Return the values ``[start, stop)`` of the flattened array."""
            ...

    Array = StoredArray | numpy.ndarray[Any, Any]

BLOCK_VALUES = 1 << 17
"""Number of values per block."""

_DEVICE_BLOCK_FACTOR = 64


def block_factor(device: torch.device) -> int:
    """Return the size of a block on ``device`` relative to a block on the CPU, which fits in a core's cache.

    On other devices every call is expensive, and a block of CPU size would keep only a few of the device's cores busy.
    """
    return 1 if device.type == "cpu" else _DEVICE_BLOCK_FACTOR


def arrays_in_memory(arrays: Sequence[Array]) -> list[numpy.ndarray[Any, Any]] | None:
    """Return ``arrays`` if all of them are in memory, or None otherwise.

    Arrays in memory can be checked by a few reductions, which release the GIL.
    """
    whole = []
    for array in arrays:
        if not isinstance(array, numpy.ndarray):
            return None
        whole.append(array)
    return whole


def value_blocks(array: Array) -> Iterator[tuple[int, numpy.ndarray[Any, Any]]]:
    """Yield blocks of consecutive values as pairs: the flat index of the first value, and the block."""
    count = math.prod(array.shape)
    for start in range(0, count, BLOCK_VALUES):
        yield start, read_values(array, start, min(start + BLOCK_VALUES, count))


def row_blocks(*arrays: Array) -> Iterator[tuple[int, list[numpy.ndarray[Any, Any]]]]:
    """Yield blocks of rows as pairs: the index of the first row, and the rows ``[row, value]`` of each of the ``arrays``.

    A row is the last axis. All arrays must have the same number of rows.
    """
    first, widest = arrays[0].shape, 1
    for array in arrays:
        widest = max(widest, array.shape[-1])
    rows = math.prod(first[:-1]) if first[-1] else 0
    size = max(1, BLOCK_VALUES // widest)
    for start in range(0, rows, size):
        blocks, stop = [], min(start + size, rows)
        for array in arrays:
            width = array.shape[-1]
            blocks.append(read_values(array, start * width, stop * width).reshape(-1, width))
        yield start, blocks


def read_values(array: Array, start: int, stop: int) -> numpy.ndarray[Any, Any]:
    """Return the values ``[start:stop]`` of the flattened array. Later reads may overwrite them."""
    return array.reshape(-1)[start:stop] if isinstance(array, numpy.ndarray) else array.flat(start, stop)


def take_rows(array: Array, width: int, indices: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """Copy the rows at ``indices``, in that order. A row has ``width`` values."""
    if isinstance(array, numpy.ndarray):
        result: numpy.ndarray[Any, Any] = array.reshape(-1, width)[indices]
        return result
    return numpy.stack([array.flat(number * width, (number + 1) * width).copy() for number in indices.tolist()])


def first_index(wrong: numpy.ndarray[Any, Any], first: int, shape: Sequence[int]) -> list[int]:
    """Return the index of the first true value of ``wrong``, a slice of an array of ``shape`` that begins at flat index ``first``."""
    return [int(i) for i in numpy.unravel_index(first + int(wrong.reshape(-1).argmax()), tuple(shape))]


def check_finite(where: str, array: Array, name: str) -> None:
    """Raise InvalidPayload unless all float16 or float32 values are finite.

    The message contains the position of the value, and calls the values ``name``.
    """
    if isinstance(array, numpy.ndarray) and _all_finite(array):
        return
    for first, block in value_blocks(array):
        if not _all_finite(block):
            invalid = ~numpy.isfinite(block)
            at = first_index(invalid, first, array.shape)
            raise InvalidPayload(f"{where}: the value at {at} is {block[invalid.argmax()]}, but {name} must be finite")


def _all_finite(array: numpy.ndarray[Any, Any]) -> bool:
    """Return True if all float16 or float32 values are finite.

    Two reductions over the bit patterns are many times faster than isfinite: the patterns of nonfinite values are the largest positive
    signed integers and the largest unsigned integers.
    """
    size = array.itemsize
    infinity = 0x7C00 if size == 2 else 0x7F800000
    sign = 1 << 8 * size - 1
    return not array.size or bool(array.view(f"<i{size}").max() < infinity and array.view(f"<u{size}").max() < sign + infinity)
