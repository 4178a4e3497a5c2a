"""Stored arrays, a block at a time: what a check of all values takes in memory has a bound, however large the array is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from .lazy import numpy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    class Stored(Protocol):
        """An array whose values are read when they are asked for, in C order."""

        @property
        def shape(self) -> tuple[int, ...]: ...

        @property
        def dtype(self) -> numpy.dtype[Any]: ...

        def flat(self, start: int, stop: int) -> numpy.ndarray[Any, Any]:
            """Values ``[start, stop)`` of the flattened array."""
            ...

    Array = Stored | numpy.ndarray[Any, Any]

BLOCK_VALUES = 1 << 17
"""Values that are checked at a time."""


def value_blocks(array: Array) -> Iterator[tuple[int, numpy.ndarray[Any, Any]]]:
    """Consecutive values, and the place of the first of them in the flattened array."""
    for start, (block,) in _blocks([array], [1]):
        yield start, block[:, 0]


def row_blocks(*arrays: Array) -> Iterator[tuple[int, list[numpy.ndarray[Any, Any]]]]:
    """Consecutive rows, along the last axis, of arrays of equally many rows, ``[row, value]``, and the number of the first row."""
    return _blocks(arrays, [array.shape[-1] for array in arrays])


def _blocks(arrays: Sequence[Array], widths: Sequence[int]) -> Iterator[tuple[int, list[numpy.ndarray[Any, Any]]]]:
    shape, width = arrays[0].shape, widths[0]
    rows = math.prod(shape) // width if width else 0
    size = max(1, BLOCK_VALUES // max(1, *widths))
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        yield start, [_flat(array, start * wide, stop * wide).reshape(-1, wide) for array, wide in zip(arrays, widths, strict=True)]


def _flat(array: Array, start: int, stop: int) -> numpy.ndarray[Any, Any]:
    return array.reshape(-1)[start:stop] if isinstance(array, numpy.ndarray) else array.flat(start, stop)


def first_place(wrong: numpy.ndarray[Any, Any], first: int, shape: Sequence[int]) -> list[int]:
    """The place in an array of ``shape`` of the first that is true of its values from ``first`` on; without a list of all."""
    return [int(i) for i in numpy.unravel_index(first + int(wrong.reshape(-1).argmax()), tuple(shape))]
