"""95% confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy

CONFIDENCE = 0.95
_GRID = 1 << 18


def student_t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the confidence interval (Student's t) of the mean of independent values, or None for a single value."""
    if len(values) < 2:
        return None
    mean, half = float(numpy.mean(values)), t_quantile(len(values) - 1) * float(numpy.std(values, ddof=1)) / math.sqrt(len(values))
    return mean - half, mean + half


def significantly_less(values: Sequence[float], others: Sequence[float]) -> bool:
    """Return True if the mean of ``values`` is significantly lower than the mean of ``others``, in a paired t-test.

    ``values[i]`` is paired with ``others[i]``. A single pair is compared directly.
    """
    differences = [value - other for value, other in zip(values, others, strict=True)]
    interval = student_t_interval(differences)
    return differences[0] < 0 if interval is None else interval[1] < 0


@cache
def t_quantile(degrees_of_freedom: int) -> float:
    """Return the two-sided 95% quantile of Student's t distribution.

    The density, as a function of the angle in t = sqrt(n) tan(angle), is integrated on a grid.
    """
    # The grid points are midpoints of equal cells. The quantile is where the sum reaches 95%.
    width = math.pi / 2 / _GRID
    density = numpy.cos((numpy.arange(_GRID) + 0.5) * width) ** (degrees_of_freedom - 1)
    cumulative = numpy.concatenate([[0.0], numpy.cumsum(density)])
    angle = numpy.interp(CONFIDENCE * cumulative[-1], cumulative, numpy.arange(_GRID + 1) * width)
    return math.sqrt(degrees_of_freedom) * math.tan(angle)


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return Wilson's score interval of the proportion ``successes / trials``. ``trials`` must be at least 1."""
    z = 1.959964
    share = successes / trials
    center = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # At a share of 0 or 1 the bound is exact; rounding would be slightly off.
    return (0.0 if successes == 0 else center - half), (1.0 if successes == trials else center + half)
