"""Exact search for the nearest of the 24 S codewords of the quaternion codec (spec/codecs/quaternion.md).

Chunks are passed as four planes w, x, y, z, float32 ``[chunk]`` each. Three searches find the same codewords:

- ``search_products`` computes all inner products, for a few chunks.
- ``search_rotations`` rotates the chunks by each secondary quaternion; the nearest Hurwitz unit then has a closed form.
- ``search_grid`` looks up a cell. The octahedral map sends half of all directions into a cube of cells; the other half are their negatives.
  A cell lists the codewords that can be nearest somewhere in it, mostly one to three, and only these are compared.

A codeword is removed from a cell's list only if another codeword beats it in the whole cell. The map is projective in every octant, so the
difference of two inner products is linear within a cell, and its minimum has a closed form.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .lazy import torch
from .products import may_round_factors, plain_product

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Planes = Sequence[torch.Tensor]
    Weights = Sequence[float | torch.Tensor]

UNITS = 24
_BLOCK = 1 << 17
_RESOLUTION = 128
# For so few chunks (generation appends a token or two), the call overhead of the other searches exceeds the search.
_MAX_PRODUCT_CHUNKS = 512
_PRODUCTS_AT_ONCE = 1 << 20
# Building the grid takes as long as an explicit search of about 2^18 (S = 4096) to 2^21 chunks (S = 24).
_GRID_BREAK_EVEN = 1 << 19
# A codeword that loses by less than this margin stays listed: it covers the rounding of cell coordinates many times over.
_MARGIN = 1e-5
_SHRINK = 1.0 - 2.0**-20
_MIN_SUM = 2.0**-100
_ENTRIES_AT_ONCE = 1 << 20


class CodebookSearch:
    """Search structure for one codebook.

    ``secondary`` is float32 ``[S, 4]``, and ``codebook`` float32 ``[24 S, 4]`` with unit p times secondary quaternion s in row s * 24 + p.
    """

    def __init__(self, secondary: torch.Tensor, codebook: torch.Tensor) -> None:
        self._secondary, self._codebook = secondary, codebook
        self._grids: dict[torch.device, Grid] = {}
        self._expected = 0

    def announce(self, chunks: int, device: torch.device) -> None:
        """Announce a search of ``chunks`` more chunks on ``device``. The grid is built once it saves time for all chunks announced so far.

        It is built before a search, never during one, so that codewords do not depend on blocks or threads.
        """
        self._expected += chunks
        if self._expected >= _GRID_BREAK_EVEN and device not in self._grids:
            self._build_grid(device)

    def nearest(self, planes: Planes) -> torch.Tensor:
        """Return the codeword with the largest inner product for each chunk, int32 ``[chunk]``. Zero chunks get an arbitrary codeword.

        If two codewords differ by no more than rounding (2^-20 of the chunk's norm), the three searches may disagree, but each is
        deterministic.
        """
        if len(planes[0]) <= _MAX_PRODUCT_CHUNKS:
            return self.search_products(planes)
        return self.search_grid(planes) if planes[0].device in self._grids else self.search_rotations(planes)

    def search_products(self, planes: Planes) -> torch.Tensor:
        """Search all codewords with a matrix product. Ties go to the lowest s, then to the lowest unit."""
        codebook = self._codebook.to(planes[0].device).T
        chunks, size = torch.stack(list(planes), 1), max(1, _PRODUCTS_AT_ONCE // codebook.shape[1])
        nearest = torch.empty(len(chunks), dtype=torch.int32, device=chunks.device)
        reduced = may_round_factors(chunks.device.type)
        # Use one buffer for all blocks, because the allocator would otherwise keep several.
        products = chunks.new_empty(min(size, len(chunks)), codebook.shape[1])
        for part, result in zip(torch.split(chunks, size), torch.split(nearest, size), strict=True):
            scores = plain_product(part, codebook) if reduced else torch.mm(part, codebook, out=products[: len(part)])
            result.copy_(scores.argmax(1))
        return nearest

    def search_rotations(self, planes: Planes) -> torch.Tensor:
        """Search all secondary quaternions by rotating the chunks. Ties go to the lowest s, then to an axis before a half unit."""
        return _search_in_blocks(planes, self._search_block)

    def search_grid(self, planes: Planes) -> torch.Tensor:
        """Search only the codewords that the grid lists for a chunk's cell. Ties go to the first codeword in the list."""
        device = planes[0].device
        if device not in self._grids:
            self._build_grid(device)
        return _search_in_blocks(planes, self._grids[device].nearest)

    def _build_grid(self, device: torch.device) -> None:
        self._grids[device] = Grid(self._codebook.to(device))

    def _search_block(self, planes: Planes) -> torch.Tensor:
        best = torch.full_like(planes[0], -1.0)
        winner = torch.zeros_like(best, dtype=torch.int32)
        for s, quaternion in enumerate(self._secondary.tolist()):
            largest, half = _unit_products(_multiply_by_conjugate(planes, quaternion))
            _update_best(best, winner, torch.maximum(largest, half), s)
        chosen = self._secondary.to(best.device).T.index_select(1, winner)
        return winner * UNITS + _nearest_unit(_multiply_by_conjugate(planes, tuple(chosen)))


class Grid:
    """Lists of the codewords that can be nearest to a direction, one list for every cell of the octahedral map.

    Each cell stores the index of its list. Column k of ``_lists`` contains the k-th codeword of every list. Shorter lists are padded with
    their first codeword. Lists of two codewords come first, and cells with the same two codewords share a list. Longer lists follow, sorted
    by length: ``_starts[k]`` is the first list with more than k codewords.
    """

    def __init__(self, codebook: torch.Tensor, resolution: int = _RESOLUTION) -> None:
        self._resolution = resolution
        rows, lists, lengths = _build_lists(codebook.cpu(), resolution)
        short = lengths <= 2
        keys, pair_of = torch.unique(lists[short, 0] * len(codebook) + lists[short, 1], return_inverse=True)
        pairs = torch.stack([keys // len(codebook), keys % len(codebook)], 1)
        longer = (~short).nonzero()[:, 0]
        longer = longer[lengths[longer].argsort(stable=True)]
        renumbered = torch.empty_like(lengths)
        renumbered[short], renumbered[longer] = pair_of, torch.arange(len(pairs), len(pairs) + len(longer), device="cpu")
        lists = torch.cat([pairs[:, [0, 1, *[0] * (lists.shape[1] - 2)]], lists[longer]])
        self._starts = [len(pairs) + int((lengths[longer] <= k).sum()) for k in range(lists.shape[1])]
        self._rows = renumbered.to(torch.int32)[rows.flatten()].to(codebook.device)
        self._lists = lists.T.to(torch.int32).contiguous().to(codebook.device)
        unit = torch.arange(UNITS, device="cpu")
        opposite = torch.arange(0, len(codebook), UNITS, device="cpu")[:, None] + torch.where(unit < 8, unit ^ 1, 31 - unit)
        self._opposite = opposite.flatten().to(torch.int32).to(codebook.device)
        # Entries 4 r to 4 r + 3: the two codewords of pair r, then their opposites.
        self._pairs = torch.cat([self._lists[:2], self._opposite[self._lists[:2]]]).T.flatten()
        self._codebook = codebook.T.contiguous()
        # The plane between the first two codewords of a list. The side on which a chunk lies decides between them.
        self._bisectors = self._codebook[:, self._lists[0]] - self._codebook[:, self._lists[1]]

    def nearest(self, planes: Planes) -> torch.Tensor:
        w, x, y, z = planes
        total = w.abs().add_(x.abs()).add_(y.abs()).add_(z.abs())
        toward = total.clamp_min_(_MIN_SUM).reciprocal_().copysign_(w)
        mapped = [plane * toward for plane in planes]
        middle = self._resolution // 2
        i, j, k = (torch.add(middle, plane, alpha=middle * _SHRINK).to(torch.int32) for plane in mapped[1:])
        row = self._rows.index_select(0, i.mul_(self._resolution).add_(j).mul_(self._resolution).add_(k))
        second = _sign_bit(_weighted_sum(mapped, _gather(self._bisectors, row)))
        entry, flipped = (row << 2).add_(second), _sign_bit(toward)
        winner = self._pairs.index_select(0, torch.add(entry, flipped, alpha=2))
        longer = (row >= self._starts[2]).nonzero()[:, 0]
        row, entry, flipped = (array.index_select(0, longer) for array in (row, entry, flipped))
        result = self._nearest_of_many(_gather(mapped, longer), row, self._pairs.index_select(0, entry))
        result ^= (result ^ self._opposite.index_select(0, result)) & -flipped
        return winner.index_copy_(0, longer, result)

    def _nearest_of_many(self, planes: Planes, row: torch.Tensor, winner: torch.Tensor) -> torch.Tensor:
        """Return the nearest codewords of chunks with more than two candidates. ``winner`` is the nearer of the first two codewords."""
        best = _weighted_sum(planes, _gather(self._codebook, winner))
        places = torch.arange(len(row), device=row.device)
        nearest = winner.clone()
        for k in range(2, len(self._lists)):
            if k > 2:
                unfinished = (row >= self._starts[k]).nonzero()[:, 0]
                planes = _gather(planes, unfinished)
                places, row, best, winner = (array.index_select(0, unfinished) for array in (places, row, best, winner))
            contender = self._lists[k].index_select(0, row)
            _update_best(best, winner, _weighted_sum(planes, _gather(self._codebook, contender)), contender)
            nearest.index_copy_(0, places, winner)
        return nearest


def _gather(rows: torch.Tensor | Planes, index: torch.Tensor) -> list[torch.Tensor]:
    """Return the entries ``index`` of each row. Gathering row by row is several times faster than gathering all rows in one call."""
    return [row.index_select(0, index) for row in rows]


def _build_lists(codebook: torch.Tensor, resolution: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Divide the map into cells, ``resolution`` along each axis. Cells with at most two codewords are not divided further.

    Returns the row index of every cell, ``[resolution] * 3``, the list of every row, ``[row, longest]``, and the length of each list.
    """
    corners = torch.cartesian_prod(*[torch.arange(2, device="cpu")] * 3)
    cells, size = corners, 2
    lists, lengths = (
        torch.arange(len(codebook), device="cpu").expand(8, -1),
        torch.full((8,), len(codebook), dtype=torch.int64, device="cpu"),
    )
    rows = torch.zeros(2, 2, 2, dtype=torch.int64, device="cpu")
    finished: list[tuple[torch.Tensor, torch.Tensor]] = []
    while True:
        lists, lengths = _prune_in_blocks(codebook, cells, size, lists, lengths)
        done = (lengths <= 2) | (size == resolution)
        first = sum(len(length) for _, length in finished)
        rows[tuple(cells[done].T)] = torch.arange(first, first + int(done.sum()), device="cpu")
        finished.append((lists[done], lengths[done]))
        if size == resolution:
            return rows, _concatenate_lists([listed for listed, _ in finished]), torch.cat([length for _, length in finished])
        size *= 2
        rows = rows.repeat_interleave(2, 0).repeat_interleave(2, 1).repeat_interleave(2, 2)
        cells = (2 * cells[~done, None] + corners).flatten(0, 1)
        # Rounding may push a chunk across the surface of the octahedron, but not beyond a cell that touches it.
        in_octahedron = torch.where(cells < size // 2, size // 2 - 1 - cells, cells - size // 2).sum(1) <= size // 2
        lists, lengths = (array[~done].repeat_interleave(8, 0)[in_octahedron] for array in (lists, lengths))
        cells = cells[in_octahedron]


def _concatenate_lists(lists: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate ``lists``, padded to the width of the last list and to at least two columns. Rows are padded with their first column."""
    width = max(2, lists[-1].shape[1])
    return torch.cat([torch.cat([part, part[:, :1].expand(-1, width)], 1)[:, :width] for part in lists])


def _prune_in_blocks(
    codebook: torch.Tensor, cells: torch.Tensor, size: int, lists: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    block = max(1, _ENTRIES_AT_ONCE // lists.shape[1])
    blocks = zip(torch.split(cells, block), torch.split(lists, block), torch.split(lengths, block), strict=True)
    keep = torch.cat([_candidate_mask(codebook, *parts, size) for parts in blocks])
    lengths = keep.sum(1)
    cell, column = keep.nonzero().T
    position = keep.cumsum(1)[cell, column] - 1
    first = lists.gather(1, keep.to(torch.int8).argmax(1, keepdim=True))
    pruned = first.repeat(1, int(lengths.max()))
    pruned[cell, position] = lists[cell, column]
    return pruned, lengths


def _candidate_mask(codebook: torch.Tensor, cells: torch.Tensor, lists: torch.Tensor, lengths: torch.Tensor, size: int) -> torch.Tensor:
    """Return a bool mask shaped like ``lists``: True for codewords that are nearest to some direction in their cell.

    The direction at map coordinates t is (1 - sum |t|, t). Within a cell, an inner product is therefore its value at the lowest corner plus
    a slope along each of the three axes. The same holds for the difference of two inner products. Its minimum over the cell is its value at
    the corner plus its negative slopes.
    """
    low = cells * (2 / size) - 1
    sign = torch.where(low < 0, -1.0, 1.0)
    lowest = torch.cat([1 - (low * sign).sum(1, keepdim=True), low], 1)
    w, x, y, z = (component.view_as(lists) for component in _gather(codebook.T.contiguous(), lists.flatten()))
    value = _weighted_sum((w, x, y, z), lowest.T[..., None].unbind())
    value = value.masked_fill_(torch.arange(lists.shape[1], device=lists.device) >= lengths[:, None], -torch.inf)
    slopes = [(component - s[:, None] * w) * (2 / size) for component, s in zip((x, y, z), sign.T, strict=True)]
    needed = torch.ones_like(lists, dtype=torch.bool)
    for place in [(0.5, 0.5, 0.5), *torch.cartesian_prod(*[torch.arange(2.0, device="cpu")] * 3).tolist()]:
        rival = _weighted_sum((value, *slopes), (1.0, *place)).argmax(1, keepdim=True)
        lead = value.gather(1, rival) - value
        for slope in slopes:
            lead += (slope.gather(1, rival) - slope).clamp_max_(0)
        needed &= lead <= _MARGIN
    return needed


def _search_in_blocks(planes: Planes, search: Callable[[Planes], torch.Tensor]) -> torch.Tensor:
    result = torch.empty_like(planes[0], dtype=torch.int32)
    for start in range(0, result.numel(), _BLOCK):
        result[start : start + _BLOCK] = search([plane[start : start + _BLOCK] for plane in planes])
    return result


def _weighted_sum(planes: Planes, weights: Weights) -> torch.Tensor:
    """Return the weighted sum of ``planes``. A weight is a number, or a tensor with one number per chunk."""
    total = planes[0] * weights[0]
    for plane, weight in zip(planes[1:], weights[1:], strict=True):
        if isinstance(weight, torch.Tensor):
            total.addcmul_(plane, weight)
        else:
            total.add_(plane, alpha=weight)
    return total


def _multiply_by_conjugate(planes: Planes, quaternion: Weights) -> list[torch.Tensor]:
    """Return the Hamilton product of each chunk with the conjugate of ``quaternion``."""
    w, x, y, z = quaternion
    rows = ((w, x, y, z), (-x, w, -z, y), (-y, z, w, -x), (-z, -y, x, w))
    return [_weighted_sum(planes, row) for row in rows]


def _unit_products(planes: Planes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inner product of each chunk with the nearest of the units +-1, +-i, +-j, +-k, and with the nearest half unit."""
    w, x, y, z = (plane.abs() for plane in planes)
    largest = torch.maximum(torch.maximum(w, x), torch.maximum(y, z))
    return largest, w.add_(x).add_(y).add_(z).mul_(0.5)


def _sign_bit(values: torch.Tensor) -> torch.Tensor:
    """Return the sign bit of float32 ``values`` as int32: 1 for negative values and -0. This is several times faster than a comparison."""
    return values.view(torch.int32) >> 31 & 1


def _nearest_unit(planes: Planes) -> torch.Tensor:
    """Return the index p of the Hurwitz unit nearest to each chunk, int32 ``[chunk]``.

    It is ``2 * i + sign`` for a unit along axis i. For a unit with half-integer components, it is 8 plus the number that their four sign
    bits form.
    """
    negative = [_sign_bit(plane) for plane in planes]
    best, number = planes[0].abs(), negative[0].clone()
    for axis in (1, 2, 3):
        _update_best(best, number, planes[axis].abs(), 2 * axis + negative[axis])
    _, half = _unit_products(planes)
    _update_best(best, number, half, 8 + sum(sign << axis for axis, sign in enumerate(negative)))
    return number


def _update_best(best: torch.Tensor, winner: torch.Tensor, score: torch.Tensor, contender: torch.Tensor | int) -> None:
    """Replace ``best`` and ``winner`` in place where ``score`` is larger. A sign mask is several times faster than torch.where."""
    above = (best - score).view(torch.int32) >> 31
    winner.bitwise_xor_((winner ^ contender).bitwise_and_(above))
    torch.maximum(best, score, out=best)
