"""Find tokens that lose precision themselves, or cost other tokens precision.

A cheap test of the stored streams finds the tokens that may. Only their pages are decoded, and their errors decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvpack.formats.head_norms import PAGE_TOKENS, exceeds_usual, has_large_size, usual_norms
from kvpack.formats.norm_rule import comparable_errors

from . import dispatch
from .dispatch import UNMEASURED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvpack.formats.base import Codec

    from .dispatch import TokenSizes

    Streams = Mapping[str, torch.Tensor]

CODED_SPREAD = 1.4
"""Norms of what maps and means leave of ordinary tokens are less than this many times the usual one."""

_DIRECTION_MARGIN = 0.9
"""Margin for errors in the coded frame, which a channel scale makes larger or smaller."""

_SAMPLED, _LEAST_SAMPLES = 32, 4
"""One in ``_SAMPLED`` tokens is enough to estimate the usual size of values, but short runs use at least ``_LEAST_SAMPLES``."""


@dataclass(frozen=True)
class EncodedRun:
    """Values of a run with their encoded streams, for measuring errors.

    Args:
        codec: Codec of the streams, without raw tokens.
        x: The values, ``[batch, kv_head, token, dim]``.
        streams: The encoded streams.
        norms: Returns the norms of ``x``, ``[batch, kv_head, token]``.
        sizes: What the encoder measured.
        kept: Raw tokens, bool ``[batch, token]``, which are not measured.
    """

    codec: Codec
    x: torch.Tensor
    streams: Streams
    norms: Callable[[], torch.Tensor]
    sizes: TokenSizes = UNMEASURED
    kept: torch.Tensor | None = None


def own_errors(run: EncodedRun) -> torch.Tensor | None:
    """Return each token's own error as a multiple of the usual one, float32 ``[batch, kv_head, token]``; None if no token can exceed it.

    Counts the smaller one of two factors: that of the error, and that of the error relative to the token's norm. So neither large nor small
    tokens are reported only for their norm.
    """
    codec, x, streams, kept = run.codec, run.x, run.streams, run.kept
    # Two tokens are too few for an outlier.
    if x.shape[2] < 3 or not may_lose(codec, streams, run.sizes, x.device):
        return None
    by_size, by_direction = _suspects_by_size(run), _suspects_by_direction(run)
    suspects = by_size if by_direction is None else by_direction if by_size is None else by_size | by_direction
    if suspects is None:
        return None
    given = run.norms()
    excluded = given <= 0 if kept is None else (given <= 0) | kept[:, None]
    result = torch.zeros_like(given)
    for start, stop in _measured_ranges(codec, suspects):
        decoded = dispatch.decode(codec, _slice(codec, streams, start, stop))
        error = torch.linalg.vector_norm(decoded.sub_(x[:, :, start:stop]), dim=3)
        part = slice(start, stop)
        errors = (size.masked_fill(excluded[:, :, part], torch.nan) for size in (error, error / given[:, :, part]))
        factors = torch.minimum(*(size / usual_norms(size) for size in errors)).nan_to_num(0.0, posinf=0.0)
        result[:, :, part] = torch.where(suspects[:, :, part], factors, result[:, :, part])
    if by_direction is not None:
        # Ordinary tokens also have directions that the codec approximates worse than others.
        ordinary = result <= codec.summary.direction_spread
        result.masked_fill_(ordinary if by_size is None else ordinary & ~by_size, 0.0)
    return result


def may_lose(codec: Codec, streams: Streams, sizes: TokenSizes, device: torch.device) -> bool:
    """Return False if ``own_errors`` is None for a run of these streams, which are on ``device``, and these sizes."""
    summary = codec.summary
    if sizes.errors is not None:
        errors = comparable_errors(sizes.errors, codec.family.nominal_bits)
        if has_large_size(errors, _DIRECTION_MARGIN * summary.direction_spread):
            return True
    if summary.error_spread:
        return dispatch.has_large_error(codec, streams, summary.error_spread, device)
    return sizes.norms is not None and has_large_size(sizes.norms, CODED_SPREAD)


def _suspects_by_size(run: EncodedRun) -> torch.Tensor | None:
    """Return a mask, bool ``[batch, kv_head, token]``, of tokens whose error may be large because of their size or their scales.

    The result is None if there are none.
    """
    codec, kept = run.codec, run.kept
    spread = codec.summary.error_spread
    sizes = codec.error_sizes(run.streams) if spread else run.sizes.norms
    if sizes is None:
        return None
    # Raw tokens were replaced by small values, so they cannot hide others.
    measured = sizes if kept is None or not kept.any() else sizes.masked_fill(kept[:, None], torch.nan)
    suspects = exceeds_usual(measured, spread or CODED_SPREAD)
    if suspects is None:
        return None
    given = run.norms()
    excluded = given <= 0 if kept is None else (given <= 0) | kept[:, None]
    # Sizes relative to the norm are imprecise if sizes are powers of two.
    larger = exceeds_usual((sizes / given).masked_fill(excluded, torch.nan), 1.0 if spread else CODED_SPREAD)
    return None if larger is None or not (suspects := suspects & larger).any() else suspects


def _suspects_by_direction(run: EncodedRun) -> torch.Tensor | None:
    """Return a mask, bool ``[batch, kv_head, token]``, of tokens whose directions the codec may approximate badly.

    The result is None if there are none.
    """
    if run.sizes.errors is None:
        return None
    errors = comparable_errors(run.sizes.errors, run.codec.family.nominal_bits)
    suspects = exceeds_usual(errors, _DIRECTION_MARGIN * run.codec.summary.direction_spread)
    if suspects is None or run.kept is None:
        return suspects
    suspects &= ~run.kept[:, None]
    return suspects if suspects.any() else None


def crowding(run: EncodedRun) -> torch.Tensor | None:
    """Return the factor by which each token enlarges a scale that others in its run share, float32 ``[batch, kv_head, token]``.

    Returns None if the scales fit all tokens.
    """
    codec, x, kept = run.codec, run.x, run.kept
    tokens = x.shape[2]
    if not codec.summary.has_run_rows or tokens < 3 or (least := codec.min_sizes(run.streams)) is None:
        return None
    step = sample_step(tokens)
    sample = x[:, :, ::step]
    if run_fits(sample, least):
        return None
    sizes = dispatch.norms(sample) / math.sqrt(x.shape[3])
    sizes = sizes.masked_fill(sizes <= 0 if kept is None else (sizes <= 0) | kept[:, None, ::step], torch.nan)
    # Tokens after the last full page are omitted, because they may be too few.
    page = min(sizes.shape[2], PAGE_TOKENS // step)
    pages = sizes[:, :, : sizes.shape[2] // page * page].reshape(*sizes.shape[:2], -1, page)
    smallest = pages.nanmedian(3).values.nan_to_num(torch.inf).amin(2, keepdim=True)
    lost = least / smallest
    if not (lost > 1).any():
        return None
    largest = x.abs().amax(3).to(torch.float32)
    if kept is not None:
        largest = largest.masked_fill(kept[:, None], 0.0)
    if least.shape[1] == 1:
        lost, top = lost.amax(1, keepdim=True), largest.amax((1, 2), keepdim=True)
    else:
        top = largest.amax(2, keepdim=True)
    factors: torch.Tensor = largest / top * lost
    return factors.nan_to_num(0.0)


def sample_step(tokens: int) -> int:
    """Return the distance in tokens between the samples by which ``crowding`` estimates the usual size in a run of ``tokens``."""
    return _SAMPLED if tokens >= PAGE_TOKENS else max(1, tokens // _LEAST_SAMPLES)


def run_fits(sample: torch.Tensor, least: torch.Tensor) -> bool:
    """Return True if no token of ``sample`` ``[batch, kv_head, token, dim]`` is too small for the scales of its run.

    ``least`` are the sizes from ``Codec.min_sizes``.
    """
    return float(dispatch.norms(sample).amin()) >= float(least.amax()) * math.sqrt(sample.shape[3])


def _measured_ranges(codec: Codec, suspects: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Return the ranges of tokens ``[start, stop)`` whose errors are measured: those of pages with ``suspects``."""
    tokens = suspects.shape[2]
    if codec.summary.entries:
        yield 0, tokens
        return
    unit = math.lcm(PAGE_TOKENS, *(layout.tokens_per_row for layout in codec.row_layouts.values()))
    for number in torch.unique(suspects.any(0).any(0).nonzero()[:, 0] // unit).tolist():
        start, stop = number * unit, min(number * unit + unit, tokens)
        # Tokens after the last full page are compared with those of that page.
        yield (max(0, start - unit) if stop - start < PAGE_TOKENS else start), stop


def _slice(codec: Codec, streams: Streams, start: int, stop: int) -> dict[str, torch.Tensor]:
    result = {}
    for name, layout in codec.row_layouts.items():
        rows = layout.tokens_per_row
        result[name] = streams[name][:, :, start // rows : -(-stop // rows)] if layout.per == "token" else streams[name]
    return result
