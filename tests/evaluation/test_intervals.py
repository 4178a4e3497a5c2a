"""Tests of confidence intervals of means and proportions."""

from __future__ import annotations

import numpy
import pytest

from kvpack.evaluation.intervals import student_t_interval, t_quantile, wilson_interval


@pytest.mark.parametrize(
    ("degrees_of_freedom", "expected"), [(1, 12.7062), (2, 4.30265), (5, 2.57058), (11, 2.20099), (30, 2.04227), (1000, 1.96234)]
)
def test_quantiles_of_student_t_match_known_values(degrees_of_freedom: int, expected: float) -> None:
    assert t_quantile(degrees_of_freedom) == pytest.approx(expected, rel=1e-4)


def test_student_t_covers_the_mean_19_times_in_20() -> None:
    assert student_t_interval([3.0]) is None
    samples = numpy.random.default_rng(0).normal(2, 3, (4000, 5))
    covered = sum(low <= 2 <= high for low, high in (student_t_interval(list(sample)) or (0.0, 0.0) for sample in samples))
    assert 0.94 < covered / 4000 < 0.96


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"), [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (40, 40, 0.9124, 1.0)]
)
def test_wilson_intervals_match_known_values(right: int, asked: int, low: float, high: float) -> None:
    assert wilson_interval(right, asked) == pytest.approx((low, high), abs=1e-4)
