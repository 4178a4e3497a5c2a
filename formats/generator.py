"""Pseudo-random generator that uses only integer and correctly rounded float64 operations (spec/packing.md, Generator)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .lazy import numpy

_MASK = (1 << 64) - 1


class Generator:
    """A SplitMix64 generator. A ``seed`` from 0 to 2^64 - 1 yields the same 64-bit words on every machine."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def next_word(self) -> int:
        """Return the next 64-bit word."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
        return z ^ z >> 31


@lru_cache(maxsize=64)
def signs(seed: int, count: int) -> tuple[int, ...]:
    """Return ``count`` signs, +1 or -1. Sign i is -1 if bit i mod 64 of word i div 64 is set. Bit 0 is the lowest bit."""
    generator = Generator(seed)
    words = [generator.next_word() for _ in range(-(-count // 64))]
    return tuple(-1 if words[i // 64] >> i % 64 & 1 else 1 for i in range(count))


def unit_quaternions(seed: int, count: int) -> numpy.ndarray[Any, Any]:
    """Return ``count`` unit quaternions (w, x, y, z), uniform on the 3-sphere: float64 ``[count, 4]``.

    Source: Marsaglia 1972, from two points of the unit disc with only +, -, x, / and square root.
    """
    x, y, square = _disc_points(seed, 2 * count)
    stretch = numpy.sqrt((1.0 - square[0::2]) / square[1::2])
    result: numpy.ndarray[Any, Any] = numpy.stack([x[0::2], y[0::2], x[1::2] * stretch, y[1::2] * stretch], -1)
    return result


def _disc_points(seed: int, count: int) -> list[numpy.ndarray[Any, Any]]:
    """Sample ``count`` points uniformly from the open unit disc by rejection. Returns x, y and the squared radius, which is never 0.

    Each coordinate uses the top 53 bits of a generator word, so it is exact in float64.
    """
    result: list[list[numpy.ndarray[Any, Any]]] = []
    drawn, missing = 0, count
    while not result or missing > 0:
        # A fraction pi/4 of the pairs of symmetric values is in the disc.
        pairs = missing + missing // 3 + 16
        values = ((_words(seed, drawn, 2 * pairs) >> numpy.uint64(11)).astype(numpy.int64) - (1 << 52)) / (1 << 52)
        x, y = values[0::2], values[1::2]
        square = x * x + y * y
        in_disc = (square > 0.0) & (square < 1.0)
        result.append([x[in_disc], y[in_disc], square[in_disc]])
        drawn, missing = drawn + 2 * pairs, missing - int(in_disc.sum())
    return [numpy.concatenate(parts)[:count] for parts in zip(*result, strict=True)]


def _words(seed: int, first: int, count: int) -> numpy.ndarray[Any, Any]:
    """Return ``count`` words of the generator, uint64 ``[count]``, starting with word ``first``."""
    numbers = numpy.arange(first + 1, first + count + 1, dtype=numpy.uint64)
    z: numpy.ndarray[Any, Any] = numpy.uint64(seed & _MASK) + numbers * numpy.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> numpy.uint64(30)) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> numpy.uint64(27)) * numpy.uint64(0x94D049BB133111EB)
    words: numpy.ndarray[Any, Any] = z ^ z >> numpy.uint64(31)
    return words
