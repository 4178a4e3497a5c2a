"""Fitting of a basis's rows to calibration statistics: transforms, scales and tables (spec/writers.md, Calibration)."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.nn import functional

from kvpack.formats.basis import MAX_WIDTH, MEAN_UNIT, flatten_tables, run_columns, run_count
from kvpack.runtime.threads import in_parallel, usable_cores

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
    costs = error_costs(statistics, [name for name in statistics.sums if name.count(".") == 1], MIN_COST)
    fitted = {}
    for name, heads in zip(costs, in_parallel(partial(_fit_tensor, statistics, costs), costs, usable_cores()), strict=True):
        layer, side = name.split(".")
        fitted[int(layer), side] = heads
        step()
    largest = max(deviations.max() for heads in fitted.values() for _, deviations, _ in heads)
    return {
        tensor_key: torch.stack([torch.cat([rows, _tensor_row(deviations / largest), tables]) for rows, deviations, tables in heads])
        for tensor_key, heads in fitted.items()
    }


def _fit_tensor(statistics: Statistics, costs: dict[str, torch.Tensor], name: str) -> list[tuple[torch.Tensor, Array, torch.Tensor]]:
    """Return each head's rows, the cost-weighted standard deviations of its columns, and its flattened tables."""
    samples = torch.cat(statistics.samples[name], 1).to(torch.float64)
    means, covariances = mean_and_covariance(statistics, name)
    heads = [_fit_head(*(part.numpy() for part in parts)) for parts in zip(means, covariances, costs[name], samples, strict=True)]
    tables = _fit_tables([values for *_, runs in heads for values in runs])
    dim, count = samples.shape[2], run_count(samples.shape[2])
    return [
        (rows, deviations, flatten_tables(tables[number * count : (number + 1) * count], dim))
        for number, (rows, deviations, _) in enumerate(heads)
    ]


def mean_and_covariance(statistics: Statistics, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the means, ``[part, channel]``, and covariances, ``[part, channel, channel]``, of the heads or frames of a tensor."""
    mean = statistics.sums[name] / statistics.counts[name]
    return mean, statistics.products[name] / statistics.counts[name] - mean[:, :, None] * mean[:, None, :]


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
        _, covariance = mean_and_covariance(statistics, name)
        shapes[name] = channel_costs(cost)
        sizes[name] = float((shapes[name] * covariance.diagonal(dim1=-2, dim2=-1)).sum())
        losses[name] = float((cost * covariance).sum())
    floors = {}
    for name, size in sizes.items():
        losses_of_kind = [loss for other, loss in losses.items() if other.split(".")[1] == name.split(".")[1]]
        floors[name] = shapes[name] * (minimum * sum(losses_of_kind) / len(losses_of_kind) / size if size > 0 else 0.0)
    return floors


def _fit_head(mean: Array, covariance: Array, cost: Array, samples: Array) -> tuple[torch.Tensor, Array, list[torch.Tensor]]:
    """Return a head's rows, the cost-weighted standard deviations of its columns, and the training values of each run of columns.

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
    rows = torch.cat([_tensor_row(coded_mean / scales / MEAN_UNIT), torch.from_numpy(matrix * scales[:, None]).to(torch.float32)])
    return rows, deviations, runs


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


def _training_values(values: Array) -> torch.Tensor:
    """Return about ``MAX_TRAINING_VALUES`` of the values, float64 in ascending order, evenly spaced by rank."""
    step = max(1, len(values) // MAX_TRAINING_VALUES)
    # Sorting takes half as long with 32 bits per value.
    return torch.from_numpy(numpy.sort(values.astype(numpy.float32))[step // 2 :: step].astype(numpy.float64))


def _fit_tables(runs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the tables of each run, float32, from 1 to ``MAX_WIDTH`` bits. ``runs`` contains the runs' training values."""
    result: list[list[torch.Tensor]] = []
    # Only the last run of a head may have fewer values.
    for _, equal in groupby(runs, len):
        values = torch.stack(list(equal))
        tables = [_fit_table(values, width).to(torch.float32) for width in range(1, MAX_WIDTH + 1)]
        result += map(list, zip(*tables, strict=True))
    return result


def _fit_table(values: torch.Tensor, width: int) -> torch.Tensor:
    """Return the Lloyd-Max tables ``[run, 2^width]``, ascending, for ascending ``values``, float64 ``[run, value]``.

    Their scales make products unbiased. For large widths, the search starts from uniform steps over the whole range.
    """
    count, levels = values.shape[1], 1 << width
    if width >= _UNIFORM_FROM:
        table = torch.from_numpy(numpy.linspace(-1, 1, levels)) * values[:, [0, -1]].abs().amax(1, keepdim=True) * _SPREAD
    else:
        starts = torch.from_numpy((numpy.arange(levels) + 0.5) / levels * (count - 1)).long()
        table = values[:, starts] + torch.from_numpy(numpy.linspace(-0.5, 0.5, levels)) * values.std(1, correction=0, keepdim=True)
    below = functional.pad(values.cumsum(1), (1, 0))
    ends = torch.zeros(len(values), levels + 1, dtype=torch.int64, device="cpu")
    for _ in range(_STEPS):
        before, ends = ends, functional.pad(torch.searchsorted(values, (table[:, 1:] + table[:, :-1]) / 2), (1, 1))
        ends[:, -1] = count
        if torch.equal(before, ends):
            break
        counts = ends.diff()
        means = below.gather(1, ends).diff() / counts.clamp_min(1)
        table = torch.where(counts > 0, means, table)
    # The products of values with their means are smaller than those with themselves, so scores and weighted sums would shrink.
    energy, kept = values.square().sum(1, keepdim=True), (means.square() * counts).sum(1, keepdim=True)
    # Rounding may leave means of neighboring cells out of order.
    return torch.where(kept > 0, table * (energy / kept), table).sort(1).values
