"""Lloyd-Max tables for known densities, in float64. Headers store the tables, so readers do not need this module."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from .errors import InvalidParameter
from .lazy import numpy

if TYPE_CHECKING:
    Array = numpy.ndarray[Any, Any]

CELLS = 1 << 16
"""Number of cells of the quadrature grid for the marginal densities."""

_TOLERANCE = 1e-10
_STEPS = 100


def lloyd_max(edges: Array, masses: Array, levels: int) -> Array:
    """Return the ``levels`` centroids, ascending, that minimize the mean squared error of a density.

    The density is constant in cells with ascending bounds ``edges``, float64 ``[cells + 1]``, and ``masses``, float64 ``[cells]``. The
    centroids are a fixed point of Lloyd's iteration: each one is the mean of the density between its neighboring midpoints. Newton's method
    finds it, starting from the companding quantizer, whose point density is the cube root of the density (Panter and Dite 1951). Raises
    InvalidParameter if 100 steps do not bring it within 1e-10, or if a cell loses all its mass.
    """
    midpoints = (edges[1:] + edges[:-1]) / 2
    masses = masses / masses.sum()
    density = masses / numpy.diff(edges)
    below = numpy.append(0.0, numpy.cumsum(masses))
    moment_below = numpy.append(0.0, numpy.cumsum(masses * midpoints))
    companded = numpy.append(0.0, numpy.cumsum(numpy.cbrt(density) * numpy.diff(edges)))
    centroids: Array = numpy.interp((numpy.arange(levels) + 0.5) / levels * companded[-1], companded, edges)
    for _ in range(_STEPS):
        inner = (centroids[1:] + centroids[:-1]) / 2
        bounds = numpy.concatenate([edges[:1], inner, edges[-1:]])
        mass = numpy.diff(numpy.interp(bounds, edges, below))
        if not (mass > 0).all():
            break
        means = numpy.diff(numpy.interp(bounds, edges, moment_below)) / mass
        # A mean depends on both of its bounds, and a bound moves half as far as either of its centroids.
        at_bounds = numpy.interp(inner, midpoints, density) / 2
        by_upper = numpy.append(at_bounds * (inner - means[:-1]), 0.0) / mass
        by_lower = numpy.append(0.0, at_bounds * (means[1:] - inner)) / mass
        slope = numpy.diag(1.0 - by_upper - by_lower) - numpy.diag(by_upper[:-1], 1) - numpy.diag(by_lower[1:], -1)
        step = numpy.linalg.solve(slope, means - centroids)
        centroids = centroids + step
        if numpy.abs(step).max() < _TOLERANCE:
            return centroids
    raise InvalidParameter(f"Lloyd-Max iteration for {levels} levels does not converge to {_TOLERANCE} in {_STEPS} steps: use fewer bits")


def octahedral_density(magnitude: Array) -> Array:
    """Return the density on [0, 1] of |xi| (and of |eta|) for directions uniform on the sphere. Source: OCTOPUS Eq. 7, both signs."""
    a = magnitude
    density: Array = 2 / (numpy.pi * numpy.sqrt(a**2 + (1 - a) ** 2)) * ((1 - a) / (1 - 2 * a + 3 * a**2) + a / (2 - 4 * a + 3 * a**2))
    return density


def triplet_norm_masses(edges: Array, dim: int) -> Array:
    """Return the mass between ``edges`` of asin(norm), for three coordinates of a uniform direction in ``dim`` >= 4 dimensions.

    Source: OCTOPUS Eq. 4 with r = sin(angle), which removes the pole at r = 1.
    """
    angle = (edges[1:] + edges[:-1]) / 2
    masses: Array = numpy.sin(angle) ** 2 * numpy.cos(angle) ** (dim - 4) * numpy.diff(edges)
    return masses


def coordinate_masses(edges: Array, dim: int) -> Array:
    """Return the relative mass between ``edges`` of asin(|u|), for a coordinate of a uniform direction in ``dim`` >= 2 dimensions.

    Source: OCTOPUS Eq. 3 with u = sin(angle), which removes the pole at u = 1.
    """
    masses: Array = numpy.cos((edges[1:] + edges[:-1]) / 2) ** (dim - 2) * numpy.diff(edges)
    return masses


def polar_angle_masses(edges: Array, first: int, second: int) -> Array:
    """Return the relative mass between ``edges`` of the angle atan(|b| / |a|).

    The vectors a and b are Gaussian, with ``first`` and ``second`` values. Source: PolarQuant, the polar form of a Gaussian vector; with
    ``first`` = ``second``: sin^(first - 1) of twice the angle.
    """
    angle = (edges[1:] + edges[:-1]) / 2
    masses: Array = numpy.cos(angle) ** (first - 1) * numpy.sin(angle) ** (second - 1) * numpy.diff(edges)
    return masses


def _ignore_underflow() -> numpy.errstate:
    """Return a context manager that ignores underflow in the tails of densities, even if NumPy is set to raise an error for it."""
    return numpy.errstate(under="ignore")


@cache
def direction_table(levels: int) -> bytes:
    """Return ``levels`` centroids of |xi|, little-endian float32."""
    with _ignore_underflow():
        edges = numpy.linspace(0.0, 1.0, CELLS + 1)
        masses = octahedral_density((edges[1:] + edges[:-1]) / 2) * numpy.diff(edges)
        return lloyd_max(edges, masses, levels).astype("<f4").tobytes()


@cache
def triplet_norm_table(dim: int, levels: int) -> bytes:
    """Return ``levels`` centroids of the norm of three coordinates of a unit vector in ``dim`` dimensions, little-endian float32."""
    with _ignore_underflow():
        angles = numpy.linspace(0.0, numpy.pi / 2, CELLS + 1)
        return lloyd_max(numpy.sin(angles), triplet_norm_masses(angles, dim), levels).astype("<f4").tobytes()


@cache
def coordinate_table(dim: int, levels: int) -> bytes:
    """Return ``levels`` centroids of the magnitude of a coordinate of a unit vector in ``dim`` dimensions, little-endian float32."""
    with _ignore_underflow():
        angles = numpy.linspace(0.0, numpy.pi / 2, CELLS + 1)
        return lloyd_max(numpy.sin(angles), coordinate_masses(angles, dim), levels).astype("<f4").tobytes()


@cache
def polar_angle_table(first: int, second: int, levels: int) -> bytes:
    """Return ``levels`` centroids, little-endian float32, of the polar angle of two norms: of ``first`` values and of ``second`` values."""
    with _ignore_underflow():
        edges = numpy.linspace(0.0, numpy.pi / 2, CELLS + 1)
        return lloyd_max(edges, polar_angle_masses(edges, first, second), levels).astype("<f4").tobytes()
