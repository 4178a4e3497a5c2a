"""Fitting of a basis's rows to calibration statistics: transforms, scales and tables (spec/writers.md, Calibration)."""

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
"""Fraction of a channel's cost that is added to it, because calibration sees only a sample of errors."""

MIN_CHANNEL = 1e-3
"""Minimum weight of a channel's errors, relative to the mean over channels, if costs are added per channel."""

MIN_COST = 0.1
"""Minimum cost of an error in any layer, relative to the mean cost of an equally large error over all layers.

A calibration may see too few tokens for which a layer matters. The value was chosen on a fifth of the text, which calibration did not read
(spec/writers.md, Calibration).
"""

MAX_MEAN = 2.0**23
"""Maximum ratio of a column's mean to its scale, so that float16 can represent the mean."""
MIN_ROW = 2.0**-11
"""Minimum norm of a row of the matrix, relative to the largest norm."""

MAX_TRAINING_VALUES = 1 << 15
"""Maximum number of values that train a table."""
_STEPS = 30
_UNIFORM_FROM = 6
_SPREAD = 1.05


def fit_rows(statistics: Statistics, step: Callable[[], None]) -> dict[tuple[int, str], torch.Tensor]:
    """Return the rows ``[kv_head, row, dim]`` of all layers' keys and values. ``step`` is called after each tensor, to report progress."""
    fitted = {}
    for name, cost in error_costs(statistics, [name for name in statistics.sums if name.count(".") == 1], MIN_COST).items():
        sums = statistics.sums[name]
        layer, side = name.split(".")
        samples = torch.cat(statistics.samples[name], 1).to(torch.float64)
        heads = []
        for head in range(len(sums)):
            mean = (sums[head] / statistics.counts[name]).numpy()
            covariance = (statistics.products[name][head] / statistics.counts[name]).numpy() - numpy.outer(mean, mean)
            heads.append(_fit_head(mean, covariance, cost[head].numpy(), samples[head].numpy()))
        fitted[int(layer), side] = heads
        step()
    largest = max(deviations.max() for heads in fitted.values() for _, deviations, _ in heads)
    return {
        tensor_key: torch.stack([torch.cat([rows, _tensor_row(deviations / largest), tables]) for rows, deviations, tables in heads])
        for tensor_key, heads in fitted.items()
    }


def error_costs(statistics: Statistics, names: Sequence[str], minimum: float) -> dict[str, torch.Tensor]:
    """Return the cost matrices of errors, float64 ``[part, dim, dim]`` with one part per head or frame, for each of ``names``.

    ``names`` contains names of statistics. ``minimum`` is the minimum cost, as in ``MIN_COST``.
    """
    # Each temperature gets the same share, and the proportions between layers are kept.
    shares = 1 / torch.stack([statistics.costs[name].diagonal(dim1=-2, dim2=-1).sum((1, 2)) for name in names]).sum(0)
    costs = {name: (statistics.costs[name] * shares[:, None, None, None]).sum(0) for name in names}
    floors = _cost_floors(statistics, costs, minimum)
    return {name: cost + torch.diag_embed(floors[name]) for name, cost in costs.items()}


def channel_costs(cost: torch.Tensor) -> torch.Tensor:
    """Return the cost of errors in each channel, ``[..., channel]``, from cost matrices ``[..., dim, dim]``.

    A small minimum is added. It is proportional to the costs, so that the result does not change if a model's keys are scaled up and its
    queries down.
    """
    diagonal = cost.diagonal(dim1=-2, dim2=-1)
    least = MIN_CHANNEL * diagonal.mean()
    return diagonal + least if least > 0 else torch.ones_like(diagonal)


def _cost_floors(statistics: Statistics, costs: dict[str, torch.Tensor], minimum: float) -> dict[str, torch.Tensor]:
    """Return the amount by which to raise each channel's cost, ``[part, channel]``, for each of ``costs``."""
    shapes, sizes, losses = {}, {}, {}
    for name, cost in costs.items():
        mean = statistics.sums[name] / statistics.counts[name]
        covariance = statistics.products[name] / statistics.counts[name] - mean[:, :, None] * mean[:, None, :]
        shapes[name] = channel_costs(cost)
        sizes[name] = float((shapes[name] * covariance.diagonal(dim1=-2, dim2=-1)).sum())
        losses[name] = float((cost * covariance).sum())
    floors = {}
    for name, size in sizes.items():
        losses_of_kind = [loss for other, loss in losses.items() if other.split(".")[1] == name.split(".")[1]]
        floors[name] = shapes[name] * (minimum * sum(losses_of_kind) / len(losses_of_kind) / size if size > 0 else 0.0)
    return floors


def _fit_head(mean: Array, covariance: Array, cost: Array, samples: Array) -> tuple[torch.Tensor, Array, torch.Tensor]:
    """Return a head's rows, the cost-weighted standard deviations of its columns, and its flattened tables.

    The first row is the mean, and the others are the transform matrix.
    """
    dim = len(mean)
    matrix, back, deviations = optimal_transform(covariance, cost)
    norms = numpy.linalg.norm(matrix, axis=1)
    coded_mean = mean @ back
    scales = numpy.maximum(deviations, numpy.abs(coded_mean) / MAX_MEAN)
    scales = numpy.maximum(scales, MIN_ROW * (deviations * norms).max() / norms)
    columns = (samples - mean) @ back / scales
    runs = [_training_values(columns[:, run_columns(run, dim)].ravel()) for run in range(run_count(dim))]
    tables = [[_fit_table(values, width) for width in range(1, MAX_WIDTH + 1)] for values in runs]
    rows = torch.cat([_tensor_row(coded_mean / scales / MEAN_UNIT), torch.from_numpy(matrix * scales[:, None]).to(torch.float32)])
    return rows, deviations, flatten_tables([[torch.from_numpy(table).to(torch.float32) for table in run] for run in tables], dim)


def optimal_transform(covariance: Array, cost: Array) -> tuple[Array, Array, Array]:
    """Return the matrix from columns to channels, its inverse, and the columns' standard deviations in descending order.

    Columns are scaled so that an error in a column costs the square of the error.
    """
    ridge = RIDGE * channel_costs(torch.from_numpy(cost)).numpy()
    ridged = cost + numpy.diag(numpy.maximum(ridge, numpy.finfo(float).tiny))
    values, vectors = numpy.linalg.eigh(ridged)
    root, inverse_root = (vectors * numpy.sqrt(values)) @ vectors.T, (vectors / numpy.sqrt(values)) @ vectors.T
    variances, rotated = numpy.linalg.eigh(root @ covariance @ root)
    order = variances.argsort()[::-1]
    deviations, rotated = numpy.sqrt(numpy.maximum(variances[order], 0.0)), rotated[:, order]
    # The rows of the first matrix are the vectors for the columns. They are orthogonal if the cost is 1 everywhere.
    return rotated.T @ inverse_root, root @ rotated, deviations


def _tensor_row(values: Array) -> torch.Tensor:
    return torch.from_numpy(values).to(torch.float32)[None]


def _training_values(values: Array) -> Array:
    """Return about ``MAX_TRAINING_VALUES`` of the values in ascending order, evenly spaced by rank."""
    step = max(1, len(values) // MAX_TRAINING_VALUES)
    # Sorting takes half as long with 32 bits per value.
    ordered: Array = numpy.sort(values.astype(numpy.float32))[step // 2 :: step].astype(numpy.float64)
    return ordered


def _fit_table(values: Array, width: int) -> Array:
    """Return the Lloyd-Max table with 2^``width`` ascending entries for ascending ``values``. Its scale makes products unbiased.

    For large widths, the search starts from uniform steps over the whole range.
    """
    table: Array
    count, levels = len(values), 1 << width
    if width >= _UNIFORM_FROM:
        table = numpy.linspace(-1, 1, levels) * max(abs(values[0]), abs(values[-1])) * _SPREAD
    else:
        table = values[((numpy.arange(levels) + 0.5) / levels * (count - 1)).astype(int)] + numpy.linspace(-0.5, 0.5, levels) * values.std()
    below, ends = numpy.append(0.0, numpy.cumsum(values)), numpy.zeros(levels + 1, numpy.int64)
    for _ in range(_STEPS):
        before, ends = ends, numpy.concatenate([[0], values.searchsorted((table[1:] + table[:-1]) / 2), [count]])
        if (before == ends).all():
            break
        counts, total = ends[1:] - ends[:-1], below[ends]
        means = (total[1:] - total[:-1]) / numpy.maximum(counts, 1)
        table = numpy.where(counts > 0, means, table)
    # The products of values with their means are smaller than those with themselves, so scores and weighted sums would shrink.
    energy, kept = numpy.square(values).sum(), (numpy.square(means) * counts).sum()
    if kept > 0:
        table *= energy / kept
    # Rounding may leave means of neighboring cells out of order.
    return numpy.sort(table)
