"""The seeded generator (spec/packing.md, Generator)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .conventions import MASK, ceil_div


def words(seed: int) -> Iterator[int]:
    """Yield the 64-bit words of SplitMix64."""
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
        yield z ^ z >> 31


def signs(seed: int, count: int) -> list[int]:
    source = words(seed)
    bits = [word >> i & 1 for word in (next(source) for _ in range(ceil_div(count, 64))) for i in range(64)]
    return [-1 if bit else 1 for bit in bits[:count]]


def unit_quaternions(seed: int, count: int) -> list[tuple[float, float, float, float]]:
    source = words(seed)

    def symmetric_value() -> float:
        return ((next(source) >> 11) - 2**52) / 2**52

    def disc_point() -> tuple[float, float, float]:
        while True:
            x, y = symmetric_value(), symmetric_value()
            q = x * x + y * y
            if 0 < q < 1:
                return x, y, q

    quaternions = []
    for _ in range(count):
        a, b, q1 = disc_point()
        c, d, q2 = disc_point()
        t = math.sqrt((1 - q1) / q2)
        quaternions.append((a, b, c * t, d * t))
    return quaternions
