"""Correctly rounded cosines and sines for the tables of the codecs angle and polar."""

from __future__ import annotations

import struct
from decimal import Decimal, localcontext
from functools import cache

from .conventions import f32

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def nearest_f32(x: Decimal) -> float:
    """Round ``x`` correctly to binary32, without rounding to binary64 first. Numbers below 10^-40 become 0."""
    guess = f32(float(x))
    if abs(x) < Decimal("1e-40"):
        return 0.0
    (bits,) = struct.unpack("<I", struct.pack("<f", guess))
    near = struct.unpack("<3f", struct.pack("<3I", bits - 1, bits, bits + 1))
    return float(min(near, key=lambda y: abs(Decimal(y) - x)))


def cosine_and_sine(theta: Decimal) -> tuple[float, float]:
    """Return the cosine and sine of an angle in [0, 2 pi), correctly rounded to binary32, from their power series to 50 digits."""
    with localcontext() as context:
        context.prec = 60
        sums, term, n = [Decimal(0), Decimal(0)], Decimal(1), 0
        while abs(term) > Decimal("1e-50"):
            sums[n % 2] += term if n % 4 < 2 else -term
            n += 1
            term = term * theta / n
        return nearest_f32(sums[0]), nearest_f32(sums[1])


@cache
def bin_direction(k: int, bins: int) -> tuple[float, float]:
    """Return (cos, sin) of 2 pi (k + 1/2) / bins."""
    with localcontext() as context:
        context.prec = 60
        theta = PI * (2 * k + 1) / bins
    return cosine_and_sine(theta)


@cache
def angle_direction(psi: float) -> tuple[float, float]:
    return cosine_and_sine(Decimal(psi))
