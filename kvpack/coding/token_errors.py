"""Tokens that lose precision, or cost others precision, by what was stored of them.

What was stored tells cheaply which tokens may: only their pages are decoded, and their errors decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvpack.formats.head_norms import PAGE_TOKENS, exceeds_usual, has_large_size, usual_norms

from . import dispatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kvpack.formats.base import Codec

    Streams = Mapping[str, torch.Tensor]

CODED_SPREAD = 1.4
"""Norms of what maps and means leave of ordinary tokens are less than this many times the usual ones."""

_SAMPLED, _LEAST_SAMPLES = 32, 4
"""One of this many tokens is enough to find the usual size of values, but not fewer than these of a short run."""


@dataclass(frozen=True)
class EncodedRun:
    """Values of a run and their streams, whose errors are measured.

    ``codec`` keeps no raw tokens, ``x`` is ``[batch, kv_head, token, dim]``, and ``norms()`` returns its norms ``[batch, kv_head, token]``.
    ``coded`` are the norms of what was encoded, for codecs that change norms and have no ``error_sizes``. ``kept``, bool
    ``[batch, token]``, are raw tokens, which do not count.
    """

    codec: Codec
    x: torch.Tensor
    streams: Streams
    norms: Callable[[], torch.Tensor]
    coded: torch.Tensor | None = None
    kept: torch.Tensor | None = None


def own_errors(run: EncodedRun) -> torch.Tensor | None:
    """Return the factor by which each token's own error exceeds the usual one, float32 ``[batch, kv_head, token]``; None if none may.

    The factor is that of the error, or that of its share of the token's norm if that is smaller: neither tokens that are large as a whole
    nor small ones count.
    """
    codec, x, streams, coded, kept = run.codec, run.x, run.streams, run.coded, run.kept
    spread = codec.summary.error_spread
    if x.shape[2] < 3 or (not spread and coded is None):
        # One of two tokens is not an outlier.
        return None
    # Raw tokens were replaced by small values, and cannot hide others.
    if spread:
        if not dispatch.has_large_error(codec, streams, spread, x.device):
            return None
        sizes = codec.error_sizes(streams)
    else:
        assert coded is not None
        if not has_large_size(coded, CODED_SPREAD):
            return None
        sizes = coded
    left_out = None if kept is None or not kept.any() else kept[:, None]
    suspects = exceeds_usual(_without(sizes, left_out), spread or CODED_SPREAD)
    if suspects is None:
        return None
    given = run.norms()
    left_out = given <= 0 if left_out is None else (given <= 0) | left_out
    # Sizes that are powers of two say little about shares.
    larger = exceeds_usual(_without(sizes / given, left_out), 1.0 if spread else CODED_SPREAD)
    if larger is None or not (suspects := suspects & larger).any():
        return None
    result = torch.zeros_like(given)
    for start, stop in _stretches(codec, suspects):
        decoded = dispatch.decode(codec, _slice(codec, streams, start, stop))
        error = torch.linalg.vector_norm(decoded.sub_(x[:, :, start:stop]), dim=3)
        part = slice(start, stop)
        errors = (_without(size, left_out[:, :, part]) for size in (error, error / given[:, :, part]))
        factors = torch.minimum(*(size / usual_norms(size) for size in errors)).nan_to_num(0.0, posinf=0.0)
        result[:, :, part] = torch.where(suspects[:, :, part], factors, result[:, :, part])
    return result


def crowding(run: EncodedRun) -> torch.Tensor | None:
    """Return the factor by which each token makes a scale of its run too large for others, float32 ``[batch, kv_head, token]``.

    The result is None if the scales fit.
    """
    codec, x, kept = run.codec, run.x, run.kept
    least = codec.min_sizes(run.streams)
    tokens = x.shape[2]
    if least is None or tokens < 3:
        return None
    step = sample_step(tokens)
    sample = x[:, :, ::step]
    if run_fits(sample, least):
        return None
    sizes = sizes_of(sample)
    sizes = _without(sizes, sizes <= 0 if kept is None else (sizes <= 0) | kept[:, None, ::step])
    # A rest that fills no page may have one token.
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
    """Return how many tokens apart those are that ``crowding`` finds the usual size of ``tokens`` tokens by."""
    return _SAMPLED if tokens >= PAGE_TOKENS else max(1, tokens // _LEAST_SAMPLES)


def run_fits(sample: torch.Tensor, least: torch.Tensor) -> bool:
    """Return True if no token of ``sample`` ``[batch, kv_head, token, dim]`` is smaller than the largest of ``Codec.least_sizes``."""
    return float(dispatch.norms(sample).amin()) >= float(least.amax()) * math.sqrt(sample.shape[3])


def sizes_of(x: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of each token and head of ``x`` ``[batch, kv_head, token, dim]``."""
    return dispatch.norms(x) / math.sqrt(x.shape[3])


def _without(sizes: torch.Tensor, left_out: torch.Tensor | None) -> torch.Tensor:
    return sizes if left_out is None else sizes.masked_fill(left_out, torch.nan)


def _stretches(codec: Codec, suspects: torch.Tensor) -> Iterator[tuple[int, int]]:
    """The tokens ``[start, stop)`` that the usual errors of pages with ``suspects`` are measured by."""
    tokens = suspects.shape[2]
    if codec.summary.entries:
        yield 0, tokens
        return
    unit = math.lcm(PAGE_TOKENS, *(layout.tokens_per_row for layout in codec.row_layouts.values()))
    for number in torch.unique(suspects.any(0).any(0).nonzero()[:, 0] // unit).tolist():
        start, stop = number * unit, min(number * unit + unit, tokens)
        # Last tokens that fill no page are measured by the last ones that do.
        yield (max(0, start - unit) if stop - start < PAGE_TOKENS else start), stop


def _slice(codec: Codec, streams: Streams, start: int, stop: int) -> dict[str, torch.Tensor]:
    result = {}
    for name, layout in codec.row_layouts.items():
        rows = layout.tokens_per_row
        result[name] = streams[name][:, :, start // rows : -(-stop // rows)] if layout.per == "token" else streams[name]
    return result
