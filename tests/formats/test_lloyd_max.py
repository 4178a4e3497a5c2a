"""Tests of Lloyd-Max tables against their definition: every centroid is the mean of its cell."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvpack.formats.errors import InvalidParameter
from kvpack.formats.lloyd_max import CELLS, direction_table, lloyd_max, octahedral_density, triplet_norm_masses, triplet_norm_table


def triplet_norm_density(r: np.ndarray, dim: int) -> np.ndarray:
    """Return the density of OCTOPUS Eq. 4 as printed in the paper."""
    log_beta = math.lgamma(1.5) + math.lgamma((dim - 3) / 2) - math.lgamma(dim / 2)
    return 2 * r**2 * (1 - r**2) ** ((dim - 5) / 2) / math.exp(log_beta)


def means_of_nearest(table: np.ndarray, points: np.ndarray, density: np.ndarray) -> np.ndarray:
    nearest = np.searchsorted((table[1:] + table[:-1]) / 2, points)
    mass = np.bincount(nearest, density, len(table))
    return np.bincount(nearest, density * points, len(table)) / mass


def test_optimal_levels_of_a_uniform_density_are_evenly_spaced() -> None:
    found = lloyd_max(np.linspace(0.0, 1.0, 1025), np.ones(1024), 8)
    np.testing.assert_allclose(found, (np.arange(8) + 0.5) / 8, atol=1e-9)


def test_optimal_levels_of_a_normal_density_equal_those_of_max() -> None:
    edges = np.linspace(-8.0, 8.0, 1 << 16)
    middles = (edges[1:] + edges[:-1]) / 2
    found = lloyd_max(edges, np.exp(-(middles**2) / 2), 8)
    np.testing.assert_allclose(found[4:], [0.2451, 0.7560, 1.344, 2.152], atol=5e-4)
    np.testing.assert_allclose(found, -found[::-1], atol=1e-9)


def test_uneven_cells_give_the_same_result_as_even_ones() -> None:
    even = np.linspace(0.0, 1.0, CELLS + 1)
    uneven = even**1.5
    tables = [lloyd_max(edges, octahedral_density((edges[1:] + edges[:-1]) / 2) * np.diff(edges), 8) for edges in (even, uneven)]
    np.testing.assert_allclose(tables[0], tables[1], atol=1e-7)


def test_the_density_of_an_octahedral_coordinate_integrates_to_one() -> None:
    points = (np.arange(CELLS) + 0.5) / CELLS
    assert octahedral_density(points).mean() == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("dim", [6, 64, 80, 128, 256])
def test_the_density_of_a_triplet_norm_integrates_to_one(dim: int) -> None:
    points = (np.arange(CELLS) + 0.5) / CELLS
    assert triplet_norm_density(points, dim).mean() == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("dim", [64, 128])
def test_masses_by_angle_match_the_density_by_norm(dim: int) -> None:
    angles = np.linspace(0.0, math.pi / 2, CELLS + 1)
    masses = triplet_norm_masses(angles, dim)
    norms = np.sin((angles[1:] + angles[:-1]) / 2)
    np.testing.assert_allclose(masses / masses.sum() / np.diff(np.sin(angles)), triplet_norm_density(norms, dim), atol=1e-4)


@pytest.mark.parametrize("levels", [1, 2, 4, 8, 64, 128])
def test_magnitudes_are_the_means_of_their_cells(levels: int) -> None:
    table = np.frombuffer(direction_table(levels), "<f4").astype(np.float64)
    points = (np.arange(1 << 20) + 0.5) / (1 << 20)
    assert len(table) == levels
    assert (np.diff(table) > 0).all()
    np.testing.assert_allclose(means_of_nearest(table, points, octahedral_density(points)), table, atol=2e-6)


@pytest.mark.parametrize("dim", [5, 64, 80, 128, 1024])
@pytest.mark.parametrize("levels", [1, 2, 8, 256])
def test_triplet_norms_are_the_means_of_their_cells(dim: int, levels: int) -> None:
    table = np.frombuffer(triplet_norm_table(dim, levels), "<f4").astype(np.float64)
    points = (np.arange(1 << 20) + 0.5) / (1 << 20)
    assert len(table) == levels
    assert (np.diff(table) > 0).all()
    assert table[0] > 0
    assert table[-1] < 1
    np.testing.assert_allclose(means_of_nearest(table, points, triplet_norm_density(points, dim)), table, atol=4e-6)


def test_a_single_level_is_the_mean_where_the_density_has_a_pole() -> None:
    (level,) = np.frombuffer(triplet_norm_table(4, 1), "<f4")
    assert level == pytest.approx(8 / (3 * math.pi), abs=1e-6)


def test_magnitudes_of_eight_levels_are_unchanged() -> None:
    """A change of these numbers would change the bytes that every writer stores by default."""
    found = np.frombuffer(direction_table(8), "<f4")
    np.testing.assert_allclose(found[[0, 1, 2, 3, 7]], [0.07215665, 0.20219182, 0.32377313, 0.44156353, 0.9278433], atol=2e-7)


def test_a_density_without_mass_is_refused() -> None:
    edges = np.linspace(0.0, 1.0, 9)
    with pytest.raises(InvalidParameter, match="does not converge"):
        lloyd_max(edges, np.array([1.0, 0, 0, 0, 0, 0, 0, 1.0]), 8)
