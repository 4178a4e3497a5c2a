"""Detection of tokens that lose precision or make other tokens lose precision, and warnings about them.

A cheap test of the stored streams finds candidates. Only pages with candidates are decoded to measure errors. Each call of kvpack issues at
most one warning, for all keys and values together.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvpack.formats.errors import KvpackWarning
from kvpack.formats.group import PER_HEAD
from kvpack.formats.token_norms import (
    GROUP_RATIO,
    HEADS,
    MIN_LOG2,
    PAGE_TOKENS,
    SHARED_RATIO,
    TOKENS,
    drop_crowded_pages,
    find_large_sizes,
    has_large_size,
    median_norms,
    relative_norms,
    shared_scale_factors,
    widening_factors,
)

from . import dispatch
from .dispatch import UNMEASURED, TokenSizes, ValueSizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvpack.formats.base import Codec

    Streams = Mapping[str, torch.Tensor]

CODED_SPREAD = 1.4
"""Ratio of a token's norm to the typical norm, after value maps and page means, above which the token is examined."""

_DIRECTION_MARGIN = 0.9
"""Factor applied to the limit for errors in the coded frame, because channel scales may enlarge or reduce errors."""

_SAMPLED, _MIN_SAMPLES = 32, 4
"""Sampling interval in tokens, and minimum number of samples, for estimating the typical size of values."""


MANY_RATIO = 4.0
"""In a page with many large tokens, a warning counts only tokens more than this many times as large as is typical of their head."""

OWN_RATIO = 1.75
"""A token is stored raw if its absolute and its relative error in a head are more than this many times the typical error."""

OWN_WARNING_RATIO = 2.0
"""A warning counts tokens whose error is more than this many times the typical error."""

MANY_OWN_RATIO = 3.0
"""In a page with many tokens that have large errors, only errors above this many times the typical error count.

In prose and code read by SmolLM2, up to ten tokens per page have 1.8 to 2.5 times the typical error, so such pages are ordinary.
"""

_LOST_ERROR = 0.45
"""Typical error, relative to the norms of a head that are too small for their stored form, above which its values count as lost."""

_OWN, _RUN, _SMALL = "own", "run", "small"
"""Kinds of poor fit: a token loses precision itself, makes a scale of its run too large for other tokens, or has too small a norm."""


@dataclass(frozen=True)
class PoorFit:
    """Tokens of an encoded run that have large errors, or that make a shared scale too large for other tokens.

    Args:
        where: Name of the run for messages.
        shared: What is affected, a key of ``_EFFECTS``.
        count: Number of such tokens, over all sequences.
        tokens: Number of all tokens, over all sequences.
        factor: Factor by which the worst token's error or scale is too large.
        sequence: Sequence of the worst token.
        token: Index of the worst token in the run.
        head: Head in which the worst token fits worst.
        rare: True if few enough tokens are affected to store them raw.
    """

    where: str
    shared: str
    count: int
    tokens: int
    factor: float
    sequence: int
    token: int
    head: int
    rare: bool


class Loss(NamedTuple):
    """The loss of precision of each token for one reason, which ``kind`` names.

    ``factors``, ``[batch, token]``, increase with the loss. Tokens with a factor above ``ratio`` are stored raw, and tokens with a factor
    above ``warned`` are counted in a warning. ``sizes``, ``[batch, kv_head, token]``, determine which head of a token the warning names.
    """

    kind: str
    factors: torch.Tensor
    ratio: float
    warned: float
    sizes: torch.Tensor


_EFFECTS = {
    HEADS: ("large", "other heads, which share its token scale,", "makes the scale {:.3g} times too large for another"),
    TOKENS: ("large", "other tokens, which share scales of a group with it,", "is {:.3g} times as large as usual"),
    _OWN: ("large", "its own values, which the codec represents poorly,", "has {:.3g} times the typical error"),
    _RUN: ("large", "other tokens, which share a scale of the run with it,", "makes the scale {:.3g} times too large for another"),
    _SMALL: ("small", "its own values, whose norms round to 0 in 8 bits,", "has a norm {:.3g} times too small"),
}
"""For each kind of poor fit: the size of the head, a phrase about what loses precision, and a phrase about the worst token."""

_REMEDIES = dict.fromkeys((HEADS, TOKENS), f"write token_scale=fp16{PER_HEAD} in the recipe, which gives every head a scale") | {
    _OWN: "use a codec with a rotation, such as octahedral, and omit mean=, channel_scale= and frame= from the recipe",
    _RUN: "give each token its own scale (per=token for minifloat, scales=fp16 for group)",
    _SMALL: "write norm=fp16 in place of norm=log8 in the recipe",
}
"""Advice on how to avoid each kind of poor fit."""

_poor_fits: ContextVar[list[PoorFit] | None] = ContextVar("poor_fits", default=None)


@dataclass(frozen=True)
class EncodedRun:
    """A run's values and their encoded streams, from which errors are measured.

    ``raw_mask`` marks the raw tokens, and ``measured`` contains the sizes of all tokens, if known.
    """

    codec: Codec
    x: torch.Tensor
    streams: Streams
    norms: Callable[[], torch.Tensor]
    sizes: TokenSizes = UNMEASURED
    raw_mask: torch.Tensor | None = None
    measured: ValueSizes | None = None

    def zeros_and_raw_tokens(self, norms: torch.Tensor) -> torch.Tensor:
        """Return a mask of tokens without a relative error, bool ``[batch, kv_head, token]``: those whose ``norms`` are 0, and raw ones."""
        return norms <= 0 if self.raw_mask is None else (norms <= 0) | self.raw_mask[:, None]


def allocate_sizes(codec: Codec, x: torch.Tensor) -> TokenSizes:
    """Return uninitialized tensors for the sizes that are measured when ``codec`` encodes ``x`` without raw tokens."""
    summary = codec.summary
    room = partial(torch.empty, x.shape[:3], dtype=torch.float32, device=x.device)
    needs_norms = summary.changes_norms and (not summary.error_spread or bool(summary.shared_scales))
    return TokenSizes(room() if needs_norms else None, room() if summary.direction_spread else None)


def measure_losses(run: EncodedRun, *, check_shared_scales: bool = True) -> list[Loss]:
    """Measure how much precision the tokens of a run lose, because the codec fits them poorly or because they share scales with other
    tokens.

    If ``check_shared_scales`` is False, scales that heads or tokens share are not examined, but scales of the whole run and norms still
    are.
    """
    summary, losses = run.codec.summary, []
    if check_shared_scales and (shared := summary.shared_scales):
        measured = run.norms() if run.sizes.norms is None else run.sizes.norms
        # In most runs, no scale is too large.
        if TOKENS in shared and (factors := widening_factors(measured, shared)).any():
            losses.append(Loss(TOKENS, factors, GROUP_RATIO, GROUP_RATIO, measured))
        if HEADS in shared and (factors := shared_scale_factors(measured)).any():
            losses.insert(0, Loss(HEADS, factors, SHARED_RATIO, SHARED_RATIO, measured))
    if (errors := relative_token_errors(run)) is not None:
        factors = errors.amax(1)
        large = factors > OWN_RATIO
        factors = factors.masked_fill(large & ~drop_crowded_pages(large) & (factors <= MANY_OWN_RATIO), 0.0)
        losses.append(Loss(_OWN, factors, OWN_RATIO, OWN_WARNING_RATIO, errors))
    if summary.has_run_rows and (sizes := scale_inflation(run)) is not None:
        losses.append(Loss(_RUN, sizes.amax(1), 1.0, 1.0, sizes))
    if summary.has_byte_norms and small_norm_heads(run.streams["norm"]).any():
        sizes = measure_small_norms(run)
        losses.append(Loss(_SMALL, sizes.amax(1), math.inf, torch.finfo(torch.float32).tiny, sizes))
    return losses


def excess_losses(run: EncodedRun) -> torch.Tensor | None:
    """Return the losses of tokens relative to their limits, or None if no token can lose precision. Raw tokens have no loss.

    The result is float32 ``[2, batch, token]``. The first row is the largest ``Loss.factors / Loss.ratio``, and the second is the largest
    ``Loss.factors / Loss.warned``. Values above 1 exceed a limit.
    """
    losses = measure_losses(run, check_shared_scales=False)
    if not losses:
        return None
    factors = torch.stack([loss.factors for loss in losses])
    if run.raw_mask is not None:
        factors = factors.masked_fill(run.raw_mask, 0.0)
    bounds = torch.tensor([[loss.ratio for loss in losses], [loss.warned for loss in losses]], dtype=torch.float32, device=factors.device)
    return (factors / bounds[:, :, None, None]).amax(1)


def report_poor_fit(
    losses: Sequence[Loss], where: str, raw_mask: torch.Tensor | None = None, keeps_large_tokens_raw: bool = False
) -> None:
    """Report the largest loss of tokens that are not raw, if it exceeds its limit.

    ``raw_mask``, bool ``[batch, token]``, marks the raw tokens. ``keeps_large_tokens_raw`` is True if tokens with high norms are raw.
    Within ``collect_poor_fits``, the loss is added to the list; otherwise, a warning is issued. If many tokens of a page have high norms in
    the same head, their loss is reported only if their norms exceed ``MANY_RATIO`` times the typical norm.
    """
    result = []
    for name, factors, _, ratio, sizes in losses:
        if raw_mask is not None:
            factors = factors.masked_fill(raw_mask, 0.0)
        lost = factors > ratio
        if name == TOKENS and lost.any():
            lost = drop_crowded_pages(lost) | (factors > MANY_RATIO)
        if lost.any():
            factors = factors.masked_fill(~lost, 0.0)
            sequence, token = divmod(int(factors.argmax()), factors.shape[1])
            head_sizes = relative_norms(sizes) if name in (HEADS, TOKENS) else sizes
            head = int(head_sizes[sequence, :, token].nan_to_num(posinf=0.0).argmax())
            rare = not keeps_large_tokens_raw and bool((drop_crowded_pages(lost) == lost).all())
            result.append(PoorFit(where, name, int(lost.sum()), lost.numel(), float(factors.amax()), sequence, token, head, rare))
    if not result:
        return
    worst, collected = max(result, key=lambda one: one.factor), _poor_fits.get()
    if collected is None:
        warn_of_poor_fits([worst], stacklevel=3)
    else:
        collected.append(worst)


@contextlib.contextmanager
def collect_poor_fits() -> Iterator[list[PoorFit]]:
    """Return a context manager that collects the reported poor fits in a list, for ``warn_of_poor_fits``."""
    result: list[PoorFit] = []
    before = _poor_fits.set(result)
    try:
        yield result
    finally:
        _poor_fits.reset(before)


def warn_of_poor_fits(poor_fits: Sequence[PoorFit], stacklevel: int = 2) -> None:
    """Issue one KvpackWarning about all of ``poor_fits``. Does nothing if there are none."""
    if not poor_fits:
        return
    worst = max(poor_fits, key=lambda one: one.factor)
    others = f"; the same is true of tokens in {len(poor_fits) - 1} more of the layers' keys and values" if len(poor_fits) > 1 else ""
    remedy = _REMEDIES[worst.shared]
    size, which, effect = _EFFECTS[worst.shared]
    if all(one.rare for one in poor_fits):
        remedy += ", or add raw=4,0.5,4, which keeps such tokens raw"
    warnings.warn(
        f"{worst.where}: in {worst.count} of {worst.tokens} tokens, one head is so {size} that {which} lose precision. "
        f"In the worst, token {worst.token} of sequence {worst.sequence}, head {worst.head} {effect.format(worst.factor)}{others}. "
        f"To avoid this, {remedy}",
        KvpackWarning,
        stacklevel=stacklevel + 1,
    )


def relative_token_errors(run: EncodedRun) -> torch.Tensor | None:
    """Return each token's error as a multiple of the typical error, float32 ``[batch, kv_head, token]``.

    Returns None if no error can be too large.

    The smaller of two multiples is returned: that of the absolute error, and that of the error relative to the token's norm. A large or
    small norm alone therefore does not cause a report.
    """
    codec, x, streams = run.codec, run.x, run.streams
    # With only two tokens, neither is an outlier.
    if x.shape[2] < 3 or not may_lose_precision(codec, streams, run.sizes, x.device):
        return None
    by_size, by_direction = _suspects_by_size(run), _suspects_by_direction(run)
    suspects = by_size if by_direction is None else by_direction if by_size is None else by_size | by_direction
    if suspects is None:
        return None
    given = run.norms()
    excluded = run.zeros_and_raw_tokens(given)
    result = torch.zeros_like(given)
    for start, stop in _measured_ranges(codec, suspects):
        decoded = dispatch.decode(codec, _slice_streams(codec, streams, start, stop))
        error = torch.linalg.vector_norm(decoded.sub_(x[:, :, start:stop]), dim=3)
        part = slice(start, stop)
        errors = (size.masked_fill(excluded[:, :, part], torch.nan) for size in (error, error / given[:, :, part]))
        factors = torch.minimum(*(size / median_norms(size) for size in errors)).nan_to_num(0.0, posinf=0.0)
        result[:, :, part] = torch.where(suspects[:, :, part], factors, result[:, :, part])
    if by_direction is not None:
        # Ordinary tokens also have directions that the codec approximates worse than others.
        ordinary = result <= codec.summary.direction_spread
        result.masked_fill_(ordinary if by_size is None else ordinary & ~by_size, 0.0)
    return result


def may_lose_precision(codec: Codec, streams: Streams, sizes: TokenSizes, device: torch.device) -> bool:
    """Return False if no token's error can be too large, in which case ``relative_token_errors`` would return None."""
    summary = codec.summary
    if sizes.errors is not None:
        errors = sizes.errors.clamp_min(summary.min_error)
        if has_large_size(errors, _DIRECTION_MARGIN * summary.direction_spread):
            return True
    if summary.error_spread:
        return dispatch.has_large_error(codec, streams, summary.error_spread, device)
    return sizes.norms is not None and has_large_size(sizes.norms, CODED_SPREAD)


def _suspects_by_size(run: EncodedRun) -> torch.Tensor | None:
    """Return a mask of tokens whose size or scales may cause a large error, bool ``[batch, kv_head, token]``.

    Returns None if there are none.
    """
    codec, raw_mask = run.codec, run.raw_mask
    spread = codec.summary.error_spread
    sizes = codec.without_sidecars.error_sizes(run.streams) if spread else run.sizes.norms
    if sizes is None:
        return None
    # Raw tokens were replaced by small values, so they cannot hide others.
    measured = sizes if raw_mask is None or not raw_mask.any() else sizes.masked_fill(raw_mask[:, None], torch.nan)
    suspects = find_large_sizes(measured, spread or CODED_SPREAD)
    if suspects is None:
        return None
    given = run.norms()
    excluded = run.zeros_and_raw_tokens(given)
    # Sizes relative to the norm are imprecise if sizes are powers of two.
    larger = find_large_sizes((sizes / given).masked_fill(excluded, torch.nan), 1.0 if spread else CODED_SPREAD)
    return None if larger is None or not (suspects := suspects & larger).any() else suspects


def _suspects_by_direction(run: EncodedRun) -> torch.Tensor | None:
    """Return a mask of tokens whose direction may cause a large error, bool ``[batch, kv_head, token]``.

    Returns None if there are none.
    """
    if run.sizes.errors is None:
        return None
    errors = run.sizes.errors.clamp_min(run.codec.summary.min_error)
    suspects = find_large_sizes(errors, _DIRECTION_MARGIN * run.codec.summary.direction_spread)
    if suspects is None or run.raw_mask is None:
        return suspects
    suspects &= ~run.raw_mask[:, None]
    return suspects if suspects.any() else None


def scale_inflation(run: EncodedRun) -> torch.Tensor | None:
    """Return the factor by which each token enlarges a scale shared within its run, float32 ``[batch, kv_head, token]``.

    Returns None if the scales fit all tokens, or if no scale is shared within a run.
    """
    codec, x, raw_mask = run.codec, run.x, run.raw_mask
    tokens = x.shape[2]
    if tokens < 3 or (least := codec.min_token_rms(run.streams)) is None:
        return None
    step = sample_stride(tokens)
    sample = dispatch.norms(x[:, :, ::step]) if run.measured is None else run.measured.norms[:, :, ::step]
    if tokens_fit_scales(sample, x.shape[3], least):
        return None
    sizes = sample / math.sqrt(x.shape[3])
    sizes = sizes.masked_fill(sizes <= 0 if raw_mask is None else (sizes <= 0) | raw_mask[:, None, ::step], torch.nan)
    # Tokens after the last full page are omitted, because they may be too few.
    page = min(sizes.shape[2], PAGE_TOKENS // step)
    pages = sizes[:, :, : sizes.shape[2] // page * page].reshape(*sizes.shape[:2], -1, page)
    smallest = pages.nanmedian(3).values.nan_to_num(torch.inf).amin(2, keepdim=True)
    lost = least / smallest
    if not (lost > 1).any():
        return None
    largest = x.abs().amax(3).to(torch.float32)
    if raw_mask is not None:
        largest = largest.masked_fill(raw_mask[:, None], 0.0)
    if least.shape[1] == 1:
        lost, top = lost.amax(1, keepdim=True), largest.amax((1, 2), keepdim=True)
    else:
        top = largest.amax(2, keepdim=True)
    factors: torch.Tensor = largest / top * lost
    return factors.nan_to_num(0.0)


def small_norm_heads(norms: torch.Tensor) -> torch.Tensor:
    """Return a mask of the heads in which most of the stored ``norms`` are the two smallest bytes, bool ``[batch, kv_head]``."""
    return 2 * (norms <= 1).sum(2) > norms.shape[2]


def measure_small_norms(run: EncodedRun) -> torch.Tensor:
    """Return the factor by which each token's norm is below the smallest 8-bit norm, float32 ``[batch, kv_head, token]``.

    It is 0 for raw tokens, for zeros, and in heads for which most tokens are decoded well.
    """
    given = run.norms()
    decoded = dispatch.decode(run.codec, dict(run.streams))
    excluded = run.zeros_and_raw_tokens(given)
    errors = (dispatch.norms(decoded.sub_(run.x)) / given).masked_fill(excluded, torch.nan)
    is_lost = errors.nanmedian(2, keepdim=True).values > _LOST_ERROR
    return torch.where(is_lost & ~excluded, (2.0**MIN_LOG2 / given).nan_to_num(), 0.0)


def sample_stride(tokens: int) -> int:
    """Return the distance in tokens between the samples that ``scale_inflation`` takes from a run of ``tokens`` tokens."""
    return _SAMPLED if tokens >= PAGE_TOKENS else max(1, tokens // _MIN_SAMPLES)


def tokens_fit_scales(norms: torch.Tensor, dim: int, minimum: torch.Tensor) -> bool:
    """Return True if no token with ``norms``, ``[batch, kv_head, token]``, and ``dim`` channels is too small for the scales of its run.

    ``minimum`` is the result of ``Codec.min_token_rms``.
    """
    return float(norms.amin()) >= float(minimum.amax()) * math.sqrt(dim)


def _measured_ranges(codec: Codec, suspects: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the ranges of tokens to decode for measuring errors: all pages that contain ``suspects``."""
    tokens = suspects.shape[2]
    if codec.summary.entries:
        yield 0, tokens
        return
    unit = math.lcm(PAGE_TOKENS, *(layout.tokens_per_row for layout in codec.row_layouts.values()))
    for number in torch.unique(suspects.any(0).any(0).nonzero()[:, 0] // unit).tolist():
        start, stop = number * unit, min(number * unit + unit, tokens)
        # Tokens after the last full page are compared with those of that page.
        yield (max(0, start - unit) if stop - start < PAGE_TOKENS else start), stop


def _slice_streams(codec: Codec, streams: Streams, start: int, stop: int) -> dict[str, torch.Tensor]:
    result = {}
    for name, layout in codec.row_layouts.items():
        rows = layout.tokens_per_row
        result[name] = streams[name][:, :, start // rows : -(-stop // rows)] if layout.per == "token" else streams[name]
    return result
