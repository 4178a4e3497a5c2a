"""The generator of seeded objects: integer and correctly rounded binary64 operations only (spec/README.md, Generator)."""

from __future__ import annotations

import math
from functools import lru_cache

_MASK = (1 << 64) - 1


class Generator:
    """SplitMix64: the same 64-bit words for the same ``seed`` (0 to 2^64 - 1) everywhere."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def word(self) -> int:
        """The next 64 bits."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
        return z ^ z >> 31

    def symmetric(self) -> float:
        """The next value in [-1, 1): the top 53 bits, exact in binary64."""
        return ((self.word() >> 11) - (1 << 52)) / (1 << 52)

    def disc(self) -> tuple[float, float, float]:
        """A uniform point of the open unit disc and its squared radius, which is not zero (rejection)."""
        while True:
            x, y = self.symmetric(), self.symmetric()
            square = x * x + y * y
            if 0.0 < square < 1.0:
                return x, y, square


@lru_cache(maxsize=64)
def signs(seed: int, count: int) -> tuple[int, ...]:
    """``count`` signs, +1 or -1: bit i mod 64 of word i div 64, lowest first; a set bit is -1."""
    generator = Generator(seed)
    words = [generator.word() for _ in range(-(-count // 64))]
    return tuple(-1 if words[i // 64] >> i % 64 & 1 else 1 for i in range(count))


@lru_cache(maxsize=4)
def unit_quaternions(seed: int, count: int) -> tuple[tuple[float, float, float, float], ...]:
    """``count`` unit quaternions (w, x, y, z), uniform on the 3-sphere, in binary64.

    Source: Marsaglia 1972, two points of the unit disc; only +, -, x, / and square root.
    """
    generator = Generator(seed)
    result = []
    for _ in range(count):
        w, x, first = generator.disc()
        y, z, second = generator.disc()
        stretch = math.sqrt((1.0 - first) / second)
        result.append((w, x, y * stretch, z * stretch))
    return tuple(result)
