"""Rotations (spec/packing.md, Rotation)."""

from __future__ import annotations

import math
from functools import cache
from operator import mul

from .conventions import f32
from .generator import signs
from .packing import power_of_two_at_least
from .refusal import require

ROTATION_KINDS = ("none", "hadamard", "signed-hadamard")


def hadamard_factors(dim: int) -> tuple[int, int] | None:
    """Return (2^k, m) with dim = 2^k * m and m = 1, 12, 20 or 28, or None if there is no such pair."""
    for m in (1, 12, 20, 28):
        if dim % m == 0 and dim // m == power_of_two_at_least(dim // m):
            return dim // m, m
    return None


def paley(m: int) -> list[list[int]]:
    if m == 1:
        return [[1]]
    r = 13 if m == 28 else m - 1
    squares = {a * a % r for a in range(1, r)}

    def chi(a: int) -> int:
        return 0 if a % r == 0 else 1 if a % r in squares else -1

    if m == 28:  # Paley's second construction
        c = [[0] + [1] * r] + [[1] + [chi(i - j) for j in range(r)] for i in range(r)]

        def block(entry: int) -> list[list[int]]:
            return [[entry, entry], [entry, -entry]] if entry else [[1, -1], [-1, -1]]

        return [[block(entry)[a][b] for entry in row for b in range(2)] for row in c for a in range(2)]
    return [[1] * m] + [[-1] + [1 if i == j else chi(i - j) for j in range(r)] for i in range(r)]


@cache
def hadamard_columns(dim: int) -> list[list[int]]:
    found = hadamard_factors(dim)
    assert found is not None, "codecs and sidecars have been checked"
    order, m = found
    p = paley(m)

    def entry(row: int, column: int) -> int:
        sylvester = -1 if (row // m & column // m).bit_count() % 2 else 1
        return sylvester * p[row % m][column % m]

    return [[entry(row, column) for row in range(dim)] for column in range(order * m)]


@cache
def cached_signs(seed: int, count: int) -> list[int]:
    return signs(seed, count)


def rotate_back(kind: str, seed: int, u: list[float]) -> list[float]:
    """Return x_j = (s_j / sqrt(dim)) * sum over i of H_ij * u_i, computed in binary64 and rounded to binary32."""
    if kind == "none":
        return u
    s = cached_signs(seed, len(u)) if kind == "signed-hadamard" else [1] * len(u)
    factor = 1 / math.sqrt(len(u))
    return [f32(sign * factor * sum(map(mul, column, u))) for sign, column in zip(s, hadamard_columns(len(u)), strict=True)]


def rotate_tolerance(u: list[float], tolerance: list[float], of_head: float = 0.0) -> list[float]:
    """Return the tolerance after a rotation (README.md, Conformance).

    It is the Euclidean norm, over the head, of the previous tolerances, plus the tolerance of the rotation. ``of_head`` is a part that
    already is such a norm.
    """
    return [math.hypot(*tolerance) + of_head + 2.0**-18 * math.hypot(*u) + 2.0**-126] * len(u)


def check_rotation(kind: str, dim: int) -> None:
    require(kind == "none" or hadamard_factors(dim) is not None, "packing.md, Rotation", f"{kind} has no head dim {dim}")
