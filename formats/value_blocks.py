"""Stored arrays, block by block: checking all values takes bounded memory, however large the array is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

from .lazy import numpy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    class Stored(Protocol):
        """An array whose values are read on demand, in C order."""

        @property
        def shape(self) -> tuple[int, ...]: ...

        @property
        def dtype(self) -> numpy.dtype[Any]: ...

        def flat(self, start: int, stop: int) -> numpy.ndarray[Any, Any]:
            """Values ``[start, stop)`` of the flattened array."""
            ...

    Array = Stored | numpy.ndarray[Any, Any]

BLOCK_VALUES = 1 << 17
"""The number of values checked at once."""


def in_memory(arrays: Sequence[Array]) -> list[numpy.ndarray[Any, Any]] | None:
    """The arrays, if none is read on demand: a few reductions then take them whole, in which other threads run."""
    found = [array for array in arrays if isinstance(array, numpy.ndarray)]
    return found if len(found) == len(arrays) else None


def value_blocks(array: Array) -> Iterator[tuple[int, numpy.ndarray[Any, Any]]]:
    """Blocks of consecutive values, each with the flat index of its first value."""
    for start, (block,) in _blocks([array], [1]):
        yield start, block[:, 0]


def row_blocks(*arrays: Array) -> Iterator[tuple[int, list[numpy.ndarray[Any, Any]]]]:
    """Blocks of rows ``[row, value]`` (along the last axis) of arrays with equally many rows, each with the number of its first row."""
    return _blocks(arrays, [array.shape[-1] for array in arrays])


def _blocks(arrays: Sequence[Array], widths: Sequence[int]) -> Iterator[tuple[int, list[numpy.ndarray[Any, Any]]]]:
    shape, width = arrays[0].shape, widths[0]
    rows = math.prod(shape) // width if width else 0
    size = max(1, BLOCK_VALUES // max(1, *widths))
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        yield (
            start,
            [values_between(array, start * wide, stop * wide).reshape(-1, wide) for array, wide in zip(arrays, widths, strict=True)],
        )


def values_between(array: Array, start: int, stop: int) -> numpy.ndarray[Any, Any]:
    """Values ``[start, stop)`` of the flattened array, valid until other values of it are asked for."""
    return array.reshape(-1)[start:stop] if isinstance(array, numpy.ndarray) else array.flat(start, stop)


def rows_at(array: Array, width: int, numbers: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """The rows ``numbers`` of ``width`` values each, in that order: a copy."""
    if isinstance(array, numpy.ndarray):
        found: numpy.ndarray[Any, Any] = array.reshape(-1, width)[numbers]
        return found
    return numpy.stack([array.flat(number * width, (number + 1) * width).copy() for number in numbers.tolist()])


def first_place(wrong: numpy.ndarray[Any, Any], first: int, shape: Sequence[int]) -> list[int]:
    """The index, in an array of ``shape``, of the first true value from flat index ``first`` on, without listing all."""
    return [int(i) for i in numpy.unravel_index(first + int(wrong.reshape(-1).argmax()), tuple(shape))]
