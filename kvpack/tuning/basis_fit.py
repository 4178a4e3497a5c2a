"""Compute the rows of a basis from calibration statistics: transform, scales and tables (spec/writers.md, Calibration)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import torch

from kvpack.formats.basis import MAX_WIDTH, MEAN_UNIT, flatten_tables, run_columns, run_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .statistics import Statistics

    Array = numpy.ndarray[Any, Any]

RIDGE = 1e-2
"""Share of a channel's cost that is added to it, because a calibration sees only part of the errors."""

MIN_CHANNEL = 1e-3
"""Minimum weight of an error in a channel, as a share of the mean over channels, if costs are added channel by channel."""

MIN_COST = 0.1
"""Minimum cost of an error in any layer, relative to the average cost over layers of an equally large error. A calibration may see few
tokens, or none, for which a layer matters. Chosen on a fifth of a calibration's text that the calibration had not read (spec/writers.md,
Calibration).
"""

LARGEST_MEAN = 2.0**23
"""Columns that vary less than this part of their mean have a larger scale, so that binary16 holds the mean."""
MIN_ROW = 2.0**-11
"""The least norm of a row of the matrix, as a part of the largest."""

TRAINED = 1 << 15
"""Maximum number of values that a table is trained by."""
_STEPS = 30
_UNIFORM_FROM = 6
_SPREAD = 1.05


def rows_of_all(found: Statistics, step: Callable[[], None]) -> dict[tuple[int, str], torch.Tensor]:
    """Return the rows ``[kv_head, row, dim]`` of every layer and side; ``step`` is called after each."""
    fitted = {}
    for name, cost in costs_of(found, [name for name in found.sums if name.count(".") == 1], MIN_COST).items():
        sums = found.sums[name]
        layer, side = name.split(".")
        samples = torch.cat(found.samples[name], 1).to(torch.float64)
        heads = []
        for head in range(len(sums)):
            mean = (sums[head] / found.counts[name]).numpy()
            covariance = (found.products[name][head] / found.counts[name]).numpy() - numpy.outer(mean, mean)
            heads.append(_fit_head(mean, covariance, cost[head].numpy(), samples[head].numpy()))
        fitted[int(layer), side] = heads
        step()
    largest = max(deviations.max() for heads in fitted.values() for _, deviations, _ in heads)
    return {
        place: torch.stack([torch.cat([rows, _row(deviations / largest), tables]) for rows, deviations, tables in heads])
        for place, heads in fitted.items()
    }


def costs_of(found: Statistics, names: Sequence[str], least: float) -> dict[str, torch.Tensor]:
    """Return the cost of errors, float64 ``[part, dim, dim]``, for heads or frames, by the ``names`` of statistics; ``least`` is like
    ``MIN_COST``."""
    # Every temperature has the same share, and layers and sides keep their proportions.
    shares = 1 / torch.stack([found.costs[name].diagonal(dim1=-2, dim2=-1).sum((1, 2)) for name in names]).sum(0)
    costs = {name: (found.costs[name] * shares[:, None, None, None]).sum(0) for name in names}
    floors = _floors(found, costs, least)
    return {name: cost + torch.diag_embed(floors[name]) for name, cost in costs.items()}


def channel_costs(cost: torch.Tensor) -> torch.Tensor:
    """Return the cost of an error in a single channel ``[..., channel]``, from costs ``[..., dim, dim]``; every channel has a small cost.

    The added costs are proportional to them, so that a model with larger keys and smaller queries in a channel is coded the same way.
    """
    diagonal = cost.diagonal(dim1=-2, dim2=-1)
    least = MIN_CHANNEL * diagonal.mean()
    return diagonal + least if least > 0 else torch.ones_like(diagonal)


def _floors(found: Statistics, costs: dict[str, torch.Tensor], least: float) -> dict[str, torch.Tensor]:
    """Return the term added to the cost of every channel ``[part, channel]``, by layer and side."""
    shapes, sizes, losses = {}, {}, {}
    for name, cost in costs.items():
        mean = found.sums[name] / found.counts[name]
        covariance = found.products[name] / found.counts[name] - mean[:, :, None] * mean[:, None, :]
        shapes[name] = channel_costs(cost)
        sizes[name] = float((shapes[name] * covariance.diagonal(dim1=-2, dim2=-1)).sum())
        losses[name] = float((cost * covariance).sum())
    floors = {}
    for name, size in sizes.items():
        losses_of_kind = [loss for other, loss in losses.items() if other.split(".")[1] == name.split(".")[1]]
        floors[name] = shapes[name] * (least * sum(losses_of_kind) / len(losses_of_kind) / size if size > 0 else 0.0)
    return floors


def _fit_head(mean: Array, covariance: Array, cost: Array, samples: Array) -> tuple[torch.Tensor, Array, torch.Tensor]:
    """Return the rows of mean and matrix, the weighted standard deviations of the columns, and the rows of the tables."""
    dim = len(mean)
    matrix, back, deviations = transform_of(covariance, cost)
    norms = numpy.linalg.norm(matrix, axis=1)
    coded_mean = mean @ back
    scales = numpy.maximum(deviations, numpy.abs(coded_mean) / LARGEST_MEAN)
    scales = numpy.maximum(scales, MIN_ROW * (deviations * norms).max() / norms)
    columns = (samples - mean) @ back / scales
    runs = [_trained(columns[:, run_columns(run, dim)].ravel()) for run in range(run_count(dim))]
    tables = [[_table(values, width) for width in range(1, MAX_WIDTH + 1)] for values in runs]
    rows = torch.cat([_row(coded_mean / scales / MEAN_UNIT), torch.from_numpy(matrix * scales[:, None]).to(torch.float32)])
    return rows, deviations, flatten_tables([[torch.from_numpy(table).to(torch.float32) for table in run] for run in tables], dim)


def transform_of(covariance: Array, cost: Array) -> tuple[Array, Array, Array]:
    """Return the matrix from columns to channels, the matrix from channels to columns, and the columns' standard deviations, descending.

    The cost of an error in a column is its square.
    """
    ridge = RIDGE * channel_costs(torch.from_numpy(cost)).numpy()
    ridged = cost + numpy.diag(numpy.maximum(ridge, numpy.finfo(float).tiny))
    values, vectors = numpy.linalg.eigh(ridged)
    root, inverse_root = (vectors * numpy.sqrt(values)) @ vectors.T, (vectors / numpy.sqrt(values)) @ vectors.T
    variances, turned = numpy.linalg.eigh(root @ covariance @ root)
    order = variances.argsort()[::-1]
    deviations, turned = numpy.sqrt(numpy.maximum(variances[order], 0.0)), turned[:, order]
    # Column j of the coded frame is what the rows of this matrix, and no others, are made of: orthogonal where the cost is 1.
    return turned.T @ inverse_root, root @ turned, deviations


def _row(values: Array) -> torch.Tensor:
    return torch.from_numpy(values).to(torch.float32)[None]


def _trained(values: Array) -> Array:
    """Return the values for training tables, ascending: evenly chosen by size."""
    step = max(1, len(values) // TRAINED)
    ordered: Array = numpy.sort(values)[step // 2 :: step]
    return ordered


def _table(values: Array, width: int) -> Array:
    """Return the Lloyd-Max table of ascending ``values`` with 2^``width`` ascending entries, whose products with the values are unbiased.

    For large widths, the search starts from uniform steps over the whole range.
    """
    table: Array
    count, levels = len(values), 1 << width
    if width >= _UNIFORM_FROM:
        table = numpy.linspace(-1, 1, levels) * max(abs(values[0]), abs(values[-1])) * _SPREAD
    else:
        table = values[((numpy.arange(levels) + 0.5) / levels * (count - 1)).astype(int)] + numpy.linspace(-0.5, 0.5, levels) * values.std()
    below = numpy.append(0.0, numpy.cumsum(values))
    for _ in range(_STEPS):
        ends = numpy.concatenate([[0], numpy.searchsorted(values, (table[1:] + table[:-1]) / 2), [count]])
        counts = numpy.diff(ends)
        means = numpy.diff(below[ends]) / numpy.maximum(counts, 1)
        table = numpy.sort(numpy.where(counts > 0, means, table))
    # A mean has a smaller product with what it stands for than that has with itself: scores and weighted sums would shrink.
    energy, kept = numpy.square(values).sum(), (numpy.square(means) * counts).sum()
    if kept > 0:
        table *= energy / kept
    return table
