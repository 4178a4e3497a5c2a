"""Fitting of a basis's frames to calibration statistics: transforms, scales and tables (spec/writers.md, Calibration)."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import torch

from kvpack.coding.bases import BalancedKeys
from kvpack.formats import rans
from kvpack.formats.frames import SCALES_PER_OCTAVE, SCALES_PER_TABLE, Frames, Rope, SymbolTables
from kvpack.runtime.threads import in_parallel, usable_cores

from .basis_fit import error_costs, mean_and_covariance, optimal_transform

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvpack.coding.encoding import Progress

    from .statistics import Framing, KeyMoments, Statistics

    Array = numpy.ndarray[Any, Any]


SUFFIX = "frames"
"""Suffix of the names of statistics for frames, after the layer and the side."""

MIN_COST = 0.03
"""Minimum cost of an error in any layer, as in basis_fit.py, but chosen for the codec transform."""

MAX_DEVIATION = 2.0**-4
"""Largest standard deviation of any column after scaling, in stored units."""
MIN_OCTAVES, MAX_OCTAVES = -4, 6
"""Range of base-2 logarithms of columns' standard deviations, in steps, for which there are tables."""
DEAD_ZONE = 0.06
"""Amount by which the rounding threshold exceeds half a step when the values of levels are computed.

Encoders do not use it. It makes decoded values slightly larger, so that keys lose less attention to raw tokens. In two windows,
SmolLM2-135M with transform-0.6 had a KL divergence of 0.042 with these values, and of 0.055 and 0.067 with 0.95 and 1.08 times these
values.
"""

MAX_LEVEL = 63
"""Largest level with a symbol of its own."""
_TABLES = (MAX_OCTAVES - MIN_OCTAVES) * SCALES_PER_OCTAVE // SCALES_PER_TABLE + 1
_STEPS = range(0, 256, SCALES_PER_TABLE)
"""Quantization steps at which tables are trained, coarsest first, unless they take fewer than _MIN_BITS or more than _MAX_BITS."""
_MIN_BITS, _MAX_BITS = 0.1, 3.0
"""Range of average bits per value. Tables are trained on all steps within it."""
MAX_SCALE = 1.25
"""Maximum factor that scales a table's values. Most columns of small tables are 0, and their lost energy must not be compensated."""
_SMOOTHED = 8.0
"""Total count that a Laplace distribution adds to the levels of each table."""
_MIN_PART = 1e-5
"""Minimum frequency of a level with a symbol of its own. Escapes take less space for rarer levels."""


def fit_frames(statistics: Statistics, framing: Framing, step: Callable[[], None]) -> dict[tuple[int, str], Frames]:
    """Return the frames of all layers' keys and values. ``step`` is called after each tensor, to report progress."""
    names = [name for name in statistics.sums if name.endswith(f".{SUFFIX}")]
    fitted: dict[tuple[int, str], list[tuple[Array, Array, Array, Array]]] = {}
    for name, cost in error_costs(statistics, names, MIN_COST).items():
        layer, side, _ = name.split(".")
        frames = []
        for parts in zip(*mean_and_covariance(statistics, name), cost, strict=True):
            mean, *matrices = (part.numpy() for part in parts)
            frames.append((mean, *optimal_transform(*matrices)))
        fitted[int(layer), side] = frames
    unit = MAX_DEVIATION / max(deviations.max() for frames in fitted.values() for _, _, _, deviations in frames)
    scales = {tensor_key: numpy.stack([_scales(deviations * unit) for *_, deviations in frames]) for tensor_key, frames in fitted.items()}
    tables = _train_tables(_transform_samples(statistics, fitted, unit), scales, step)
    return {
        tensor_key: Frames(
            torch.from_numpy(numpy.stack([numpy.concatenate([mean[None], matrix / unit]) for mean, matrix, _, _ in frames])).float(),
            scales[tensor_key],
            tables,
            framing.ropes[tensor_key[0]] if tensor_key[1] == "k" else None,
        )
        for tensor_key, frames in fitted.items()
    }


def _scales(deviations: Array) -> Array:
    """Return the scales of columns with these standard deviations. Several scales share a table, which is for the middle of their range."""
    octaves = numpy.log2(numpy.maximum(deviations, numpy.finfo(float).tiny))
    middle = SCALES_PER_OCTAVE * MIN_OCTAVES - SCALES_PER_TABLE / 2
    result: Array = numpy.clip(numpy.round(middle - SCALES_PER_OCTAVE * octaves), 0, 255).astype(numpy.int64)
    return result


def _transform_samples(
    statistics: Statistics, fitted: dict[tuple[int, str], list[tuple[Array, Array, Array, Array]]], unit: float
) -> dict[tuple[int, str], Array]:
    """Return the samples transformed to columns, ``[frame, token, column]``, by (layer, side)."""
    columns = {}
    for (layer, side), frames in fitted.items():
        samples = torch.cat(statistics.samples[f"{layer}.{side}.{SUFFIX}"], 1).to(torch.float64).numpy()
        transformed = [(samples[number] - mean) @ back * unit for number, (mean, _, back, _) in enumerate(frames)]
        # With 32 bits per value, training the tables takes less time.
        columns[layer, side] = numpy.stack(transformed).astype(numpy.float32)
    return columns


def _train_tables(columns: dict[tuple[int, str], Array], scales: dict[tuple[int, str], Array], step: Callable[[], None]) -> SymbolTables:
    """Return the coding tables, one for each range of standard deviations.

    They are trained on all columns, at all usual quantization steps. ``step`` is called after each tensor.
    """
    levels = 2 * MAX_LEVEL + 1
    totals = numpy.zeros((4, _TABLES, levels + 1))
    for counted in in_parallel(lambda key: _count_levels(columns[key], scales[key]), columns, usable_cores()):
        totals += counted
        step()
    counts, seen, sums, squares = totals
    grid = numpy.arange(-MAX_LEVEL, MAX_LEVEL + 1)
    within = sums[:, :levels]
    deviations = 2.0 ** (MIN_OCTAVES + SCALES_PER_TABLE / SCALES_PER_OCTAVE * numpy.arange(_TABLES))
    usual = numpy.exp(-math.sqrt(2) * numpy.abs(grid) / deviations[:, None])
    parts = counts[:, :levels] + _SMOOTHED * usual / usual.sum(1, keepdims=True)
    total = parts.sum(1, keepdims=True) + counts[:, levels:]
    rare = parts < _MIN_PART * total
    rare[:, MAX_LEVEL] = False
    # A count of 1 in 2^20 keeps a symbol in a table. Escapes always have one.
    kept = numpy.where(rare, 0, numpy.ceil(parts / total * 2**20)).astype(numpy.int64)
    escapes = numpy.maximum(1, 2**20 - kept.sum(1))
    # Rare levels are drawn toward the middle of their step.
    seen = seen[:, :levels]
    values = (within + 4.0 * grid) / (seen + 4.0)
    values[:, MAX_LEVEL] = 0.0
    # Means have less energy than the values that they represent, as in klt's tables.
    energy, decoded = squares[:, :levels].sum(1), (seen * numpy.square(values)).sum(1)
    target_energy = numpy.clip(energy, decoded, MAX_SCALE**2 * decoded)
    values *= numpy.sqrt(numpy.divide(target_energy, decoded, out=numpy.ones_like(decoded), where=decoded > 0))[:, None]
    frequencies = rans.frequencies(numpy.concatenate([escapes[:, None], kept], 1))
    return SymbolTables(frequencies, torch.from_numpy(values).to(torch.float16).to(torch.float32))


def _count_levels(columns: Array, scales: Array) -> Array:
    """Return a tensor's statistics for its tables, ``[4, table, level]``, summed over all usual quantization steps.

    For each level, these are its count, its count with a dead zone, and the sums of the columns and of their squares with a dead zone.
    """
    levels = 2 * MAX_LEVEL + 1
    # The last entry counts levels that have no symbol.
    result = numpy.zeros((4, _TABLES * (levels + 1)))
    # A finer step takes more bits, so the first usual one is found by bisection.
    first = bisect_left(_STEPS, _MIN_BITS, key=partial(_bits_at_step, columns))
    for step in _STEPS[first:]:
        steps = _in_steps(columns, step)
        coded = _round_to_levels(steps, 0.0)
        if _entropy(coded) > _MAX_BITS:
            break
        row = numpy.clip((step - scales) // SCALES_PER_TABLE, 0, _TABLES - 1)[:, None, :] * (levels + 1)
        for level, added in ((coded, {0: None}), (_round_to_levels(steps, DEAD_ZONE), {1: None, 2: steps, 3: numpy.square(steps)})):
            at = (row + numpy.where(numpy.abs(level) <= MAX_LEVEL, level + MAX_LEVEL, levels).astype(numpy.int64)).ravel()
            for total, weights in added.items():
                result[total] += numpy.bincount(at, None if weights is None else weights.ravel(), result.shape[1])
    return result.reshape(4, _TABLES, levels + 1)


def _in_steps(columns: Array, step: int) -> Array:
    """Return columns in units of the quantization step that the byte ``step`` represents."""
    result: Array = columns * 2.0 ** (step / SCALES_PER_OCTAVE)
    return result


def _bits_at_step(columns: Array, step: int) -> float:
    return _entropy(_round_to_levels(_in_steps(columns, step), 0.0))


def _round_to_levels(steps: Array, dead_zone: float) -> Array:
    """Round columns to levels as encoders do, but with a dead zone."""
    result: Array = numpy.sign(steps) * numpy.floor(numpy.abs(steps) + (0.5 - dead_zone))
    return result


def _entropy(levels: Array) -> float:
    """Return the bits per value of ``levels``, ``[frame, token, column]``, if each column has its own ideal table."""
    tokens = levels.shape[1]
    ordered = numpy.sort(levels, 1)
    # This is True where a sequence of equal levels begins. The counts are the lengths of the sequences.
    begins = numpy.concatenate([numpy.ones_like(ordered[:, :1], bool), ordered[:, 1:] != ordered[:, :-1]], 1)
    at = numpy.flatnonzero(begins.transpose(0, 2, 1).ravel())
    runs = numpy.diff(numpy.append(at, begins.size)) / tokens
    return float(-(runs * numpy.log2(runs)).sum() / (levels.shape[0] * levels.shape[2]))


RIDGE = 1e-3
"""Fraction of the mean second moment that is added to each channel's, because calibration sees only a sample of keys and queries."""


def fit_balanced_keys(
    moments_by_layer: Sequence[KeyMoments], ropes: Sequence[Rope | None] | None, progress: Progress | None = None
) -> dict[int, BalancedKeys]:
    """Return the balanced frames of each layer. ``progress`` counts layers.

    ``ropes`` contains the RoPE of each layer's keys. If it is None, the means of keys before RoPE are omitted.
    """
    fitted = {}
    for layer, moments in enumerate(moments_by_layer):
        queries = moments.queries / moments.rows
        fitted[layer] = BalancedKeys(
            balancing_frames(moments.keys / moments.tokens, queries).to(torch.float32),
            balancing_frames(moments.pages / moments.tokens, queries).to(torch.float32),
            queries.to(torch.float32),
            None if ropes is None else (moments.keys_before_rope / moments.tokens).to(torch.float32),
            None if ropes is None else ropes[layer],
        )
        if progress:
            progress(layer + 1, len(moments_by_layer))
    return fitted


def balancing_frames(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return frames ``[kv_head, column, channel]`` for second moments of keys and queries, float64 ``[kv_head, dim, dim]``.

    In such a frame, keys and queries have the same diagonal second moments, in descending order. The mean square norm of a frame's rows is
    1.
    """
    root = torch.linalg.cholesky(_add_ridge(keys))
    shared, vectors = torch.linalg.eigh(root.mT @ _add_ridge(queries) @ root)
    # The rows of the transpose of L U Lambda^(-1/4), which is the inverse of Lambda^(1/4) U^T L^-1.
    frames: torch.Tensor = (root @ vectors * shared.clamp_min(torch.finfo(shared.dtype).tiny).pow(-0.25)[:, None]).mT.flip(1)
    return frames.div_(frames.square().sum(2).mean(1).sqrt()[:, None, None])


def frame_cost(frames: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return the cost of an isotropic error in the frames, relative to encoding without frames, ``[kv_head]``.

    The error is proportional to the size of keys in the frame, and its cost is proportional to the size of queries.
    """
    inverse = torch.linalg.inv(frames)
    cost = _trace(inverse.mT @ keys @ inverse) * _trace(frames @ queries @ frames.mT)
    return cost / (_trace(keys) * _trace(queries))


def compare_halves(halves: Sequence[tuple[KeyMoments, KeyMoments]]) -> dict[str, float] | None:
    """Fit frames to half of the text, and return their mean ``frame_cost`` on the same half ("own") and on the other half ("other").

    Costs are averaged over layers and heads. The frames in a basis are fitted to both halves. Returns None if a half is empty.
    """
    own_costs, other = [], []
    for pair in halves:
        if not all(half.tokens for half in pair):
            return None
        moments = [(half.keys / half.tokens, half.queries / half.rows) for half in pair]
        frames = [balancing_frames(*half) for half in moments]
        own_costs += [frame_cost(frame, *half) for frame, half in zip(frames, moments, strict=True)]
        other += [frame_cost(frame, *half) for frame, half in zip(frames, reversed(moments), strict=True)]
    return {"own": float(torch.cat(own_costs).mean()), "other": float(torch.cat(other).mean())}


def _add_ridge(moments: torch.Tensor) -> torch.Tensor:
    """Add ``RIDGE`` times the mean second moment to each channel's second moment, so that none is zero."""
    mean = moments.diagonal(dim1=1, dim2=2).mean(1)
    ridge = torch.where(mean > 0, RIDGE * mean, 1.0)
    return moments + ridge[:, None, None] * torch.eye(moments.shape[1], dtype=moments.dtype, device=moments.device)


def _trace(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.diagonal(dim1=1, dim2=2).sum(1)
