"""Search for the nearest direction of an octahedral codebook, with the roundings that encoders offer.

The search is limited to the quarter square xi, eta >= 0. Among a codeword and its mirror images, the nearest always has the signs of the
direction's x and y, so the signs are stored and not searched. A direction is three float32 tensors of one shape: nonnegative x and y, and z
of any sign. Its length does not matter.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

from .lazy import numpy, torch
from .products import product

ROUNDINGS = ("scalar", "local2x2", "local3x3", "full")

_GRID_ROUNDING = "local2x2"
_CELLS_PER_LEVEL = 64
_MAX_CELLS = 1024
_CELL_ROWS_PER_BLOCK = 64
_MAX_CACHED_CODEBOOKS = 4
_MAX_GRID_CODEBOOK = 1 << 12
_MAX_COMPARISONS = 15
_FULL_SEARCH_PRODUCTS = 1 << 22
_MIN_SUM = 1e-30


def octahedral_coordinates(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return |xi| and |eta| of a direction, in [0, 1]. Both are 0 for the zero vector. Source: OCTOPUS Eq. 5.

    For z < 0 the fold 1 - y / l equals (x + |z|) / l, so adding max(-z, 0) to x and y covers both signs of z.
    """
    folded = (-z).clamp_(min=0)
    scale = torch.add(x, y).add_(z).add_(folded, alpha=2).clamp_(min=_MIN_SUM).reciprocal_()
    return (x + folded).mul_(scale), folded.add_(y).mul_(scale)


def codebook_directions(table: bytes) -> torch.Tensor:
    """Return the unit directions of all pairs of magnitudes, float32 ``[3, levels^2]``. Entry i + levels * j has xi = c_i and eta = c_j.

    ``table`` contains the ascending magnitudes c, little-endian float32. Source: OCTOPUS Eq. 6, in float64.
    """
    magnitudes = numpy.frombuffer(table, "<f4").astype(numpy.float64)
    eta, xi = (axis.ravel() for axis in numpy.meshgrid(magnitudes, magnitudes, indexing="ij"))
    z = 1 - xi - eta
    vectors = numpy.stack([numpy.where(z < 0, 1 - eta, xi), numpy.where(z < 0, 1 - xi, eta), z])
    return torch.from_numpy((vectors / numpy.sqrt((vectors**2).sum(0))).astype(numpy.float32))


def midpoints(table: bytes) -> list[float]:
    """Return the midpoints between neighboring centroids of ``table``."""
    centroids = numpy.frombuffer(table, "<f4").astype(numpy.float64)
    return [float(bound) for bound in (centroids[1:] + centroids[:-1]) / 2]


def nearest_level(values: torch.Tensor, bounds: list[float]) -> torch.Tensor:
    """Return the number of ascending ``bounds`` that are below each value, as float32 in the shape of ``values``."""
    if len(bounds) > _MAX_COMPARISONS:
        return torch.bucketize(values, torch.tensor(bounds, dtype=torch.float32, device=values.device)).to(torch.float32)
    # A few comparisons are up to ten times faster than one binary search per element.
    level, above = torch.zeros_like(values), torch.empty_like(values)
    for bound in bounds:
        level += torch.gt(values, bound, out=above)
    return level


@lru_cache(_MAX_CACHED_CODEBOOKS)
def codebook(table: bytes, device: torch.device) -> Codebook:
    """Return the cached codebook for a table of magnitudes (see ``codebook_directions``), with tensors on ``device``."""
    return Codebook(table, device)


class Codebook:
    """Search structure for the nearest direction, which is the one with the largest dot product (OCTOPUS Eq. 12)."""

    def __init__(self, table: bytes, device: torch.device) -> None:
        self.levels = len(table) // 4
        self._bounds = midpoints(table)
        self._magnitudes = torch.from_numpy(numpy.frombuffer(table, "<f4").copy()).to(device)
        self._directions = codebook_directions(table).to(device)
        self._device = device

    def nearest(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, rounding: str) -> torch.Tensor:
        """Return the index ``i + levels * j`` that ``rounding`` selects, int32 in the shape of ``x``.

        scalar: the nearest magnitudes. local2x2: the best of the magnitudes on either side. local3x3: the best of the nearest magnitudes
        and their neighbors. full: the best of all magnitudes.
        """
        if rounding == "full":
            return self._full_search(x, y, z)
        if rounding == "local3x3" and self.levels**2 <= _MAX_GRID_CODEBOOK:
            return self._grid_search(x, y, z)
        return self.local_search(x, y, z, rounding)

    def projection(self, index: torch.Tensor, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return the dot product of each direction and the codeword ``index``."""
        flat = index.reshape(-1)
        nx, ny, nz = (self._directions[axis].index_select(0, flat).view(index.shape) for axis in range(3))
        return nx.mul_(x).addcmul_(ny, y).addcmul_(nz, z)

    def local_search(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, rounding: str) -> torch.Tensor:
        """Return the result of ``nearest`` for any rounding except full, as in OCTOPUS Algorithm 1."""
        columns, rows = self._candidates(torch.stack(octahedral_coordinates(x, y, z)), rounding).unbind(1)
        index = torch.add(columns, rows.unsqueeze(1), alpha=self.levels).flatten(0, 1)
        if rounding == "scalar":
            return index[0]
        best = self.projection(index, x, y, z).max(0, keepdim=True).indices
        return index.gather(0, best)[0]

    def _candidates(self, coordinates: torch.Tensor, rounding: str) -> torch.Tensor:
        """Return the levels to compare, int32 ``[candidate, ...]``, nearest first."""
        nearest = nearest_level(coordinates, self._bounds).to(torch.int32)
        if rounding == "scalar":
            return nearest[None]
        if rounding == "local2x2":
            magnitudes = self._magnitudes.index_select(0, nearest.view(-1)).view(nearest.shape)
            other_side = torch.sub(coordinates, magnitudes).sign_().to(torch.int32)
            return torch.stack([nearest, other_side.add_(nearest).clamp_(0, self.levels - 1)])
        return torch.stack([nearest, nearest - 1, nearest + 1]).clamp_(0, self.levels - 1)

    def _full_search(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        vectors = torch.stack([x, y, z], -1).reshape(-1, 3)
        chunks = torch.split(vectors, max(1, _FULL_SEARCH_PRODUCTS // self.levels**2))
        return torch.cat([product(chunk, self._directions).argmax(-1) for chunk in chunks]).to(torch.int32).view(x.shape)

    def _grid_search(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """Return the result of the local 3x3 search. Most codewords are read from a grid; only cells that codewords share are searched."""
        xi, eta = (coordinate.mul_(self._cells_per_side).floor_() for coordinate in octahedral_coordinates(x, y, z))
        cell = xi.add_(eta, alpha=self._cells_per_side + 1).to(torch.int32).view(-1)
        index = self._grid.index_select(0, cell).to(torch.int32)
        shared = _negative_indices(index)
        px, py, pz = (axis.view(-1).index_select(0, shared) for axis in (x, y, z))
        index[shared] = self.local_search(px, py, pz, _GRID_ROUNDING)
        return index.view(x.shape)

    @property
    def _cells_per_side(self) -> int:
        """Number of cells along each side of the grid: enough that only a few percent of directions are in shared cells."""
        return min(_CELLS_PER_LEVEL * self.levels, _MAX_CELLS)

    @cached_property
    def _grid(self) -> torch.Tensor:
        """Codeword nearest to all directions of a cell, or -1 if codewords share the cell: int16 ``[(cells + 1)^2]`` with xi fastest.

        A cell is not shared if its four corners have the same nearest codeword. The directions nearest to one codeword form an intersection
        of half-spaces, which is convex. On either side of the fold xi + eta = 1, which runs along diagonals of cells, the map is linear, so
        a cell (or each half of a cell on the fold) is the cone over its corners. The local searches find the nearest of all codewords;
        tests compare them with the full search. The last cell of a row or column is for a coordinate of exactly 1 and equals the cell
        before it.
        """
        corners = torch.arange(self._cells_per_side + 1, dtype=torch.float32, device=self._device) / self._cells_per_side
        bands = []
        # Processing all cells at once would need fifty times the grid's memory.
        for first in range(0, self._cells_per_side, _CELL_ROWS_PER_BLOCK):
            eta, xi = torch.meshgrid(corners[first : first + _CELL_ROWS_PER_BLOCK + 1], corners, indexing="ij")
            z = 1 - xi - eta
            nearest = self.local_search(torch.where(z < 0, 1 - eta, xi), torch.where(z < 0, 1 - xi, eta), z, _GRID_ROUNDING)
            lowest = nearest[:-1, :-1]
            agreed = (lowest == nearest[:-1, 1:]) & (lowest == nearest[1:, :-1]) & (lowest == nearest[1:, 1:])
            bands.append(torch.where(agreed, lowest, -1).to(torch.int16))
        settled = torch.cat(bands)
        settled = torch.cat([settled, settled[:, -1:]], 1)
        return torch.cat([settled, settled[-1:]]).view(-1)


def _negative_indices(values: torch.Tensor) -> torch.Tensor:
    """Return the indices of the negative values in a flat tensor. On a CPU, NumPy finds them four times as fast as torch."""
    if values.device.type == "cpu":
        return torch.from_numpy(numpy.flatnonzero(values.numpy() < 0))
    return torch.nonzero(values < 0).view(-1)
