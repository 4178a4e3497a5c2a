"""Norms of tokens: their stored forms (spec/packing.md, Norms of 8 bits), and tokens with unusual norms (spec/writers.md, Raw tokens).

A norm is stored as float16, float32, or one byte that codes its logarithm. The typical norm of a token is the median norm of its page,
``PAGE_TOKENS`` consecutive tokens of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

from .errors import ValueTooLarge
from .lazy import functional, torch
from .streams import HALF_LIMIT, NORMS
from .tables import cache_per_device
from .value_blocks import BLOCK_VALUES

LOG8 = "log8"
TOKEN_NORMS = {**NORMS, LOG8: "U8"}
"""Stored dtypes of token norms, by parameter value."""

LOG_NORMS_FEATURE = "log-norms"
"""Feature that readers need for norms stored as bytes."""

STEPS_PER_OCTAVE, MIN_LOG2 = 16, -7
"""Number of codes per octave, and the base-2 logarithm of the smallest nonzero norm, which has code 1."""

_CODES = 256

PAGE_TOKENS = 128
"""Number of tokens per page, counted from the first token of a run.

The tokens of a partial last page are compared with the last ``PAGE_TOKENS`` tokens instead.
"""

HEADS, TOKENS = "heads", "tokens"
"""Units that may share a scale: all heads of a token, or all tokens of a group."""

SHARED_RATIO = 1.5
"""Factor by which a shared scale may exceed the scale for a head's own norm before the head loses precision."""

GROUP_RATIO = 2.0
"""Multiple of the typical norm in a head above which a token costs the rest of its group precision."""

MAX_PER_PAGE = 4
"""Maximum number of tokens per page that are kept raw because of one head. If more qualify, they are not outliers."""


compiled_has_large_size: Callable[[torch.Tensor, float], bool | None] = lambda sizes, ratio: None  # noqa: E731
"""A C implementation of ``has_large_size``, set by ``kvpack.coding.dispatch``. It returns None if the C kernels are unavailable."""


def norm_features(norm: str) -> frozenset[str]:
    """Return the features that a reader needs if a codec stores norms in the form ``norm``."""
    return frozenset({LOG_NORMS_FEATURE} if norm == LOG8 else ())


def _decode_log8(code: float) -> float:
    return float(2.0 ** (MIN_LOG2 + code / STEPS_PER_OCTAVE))


MAX_LOG8 = _decode_log8(_CODES - 2)
LOG8_LIMIT = _decode_log8(_CODES - 1.5)
"""The smallest norm that is too large for a byte: it would round to a code above 255."""

LIMITS = {"F16": HALF_LIMIT, "F32": float("inf"), "U8": LOG8_LIMIT}
"""For each stored dtype, the smallest norm that does not fit."""

MAX_STORED = {"F16": 65504.0, "F32": 3.4028234663852886e38, "U8": MAX_LOG8}
"""The largest finite number of each stored dtype."""


@cache_per_device
def log8_values() -> torch.Tensor:
    """Return the decoded norm of each code, float32 ``[256]``."""
    return torch.tensor([0.0, *(_decode_log8(place) for place in range(_CODES - 1))], dtype=torch.float32)


@cache_per_device
def log8_bounds() -> torch.Tensor:
    """Return the smallest norm that is rounded to each code from 1 to 255, float32 ``[255]``.

    The first bound is half of the smallest nonzero norm; the other bounds are midpoints between neighboring codes.
    """
    return torch.tensor([_decode_log8(0) / 2, *(_decode_log8(place - 0.5) for place in range(1, _CODES - 1))], dtype=torch.float32)


def stored_norm(values: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    """Round norms or scales to their stored dtype.

    Args:
        values: Floating-point tensor of any shape.
        dtype: Stored dtype, "F16" or "F32".
        name: Name that the message uses for a value.

    Returns:
        The rounded values in the same shape: float16 or float32.

    Raises:
        ValueTooLarge: A value does not fit. The message contains its position, the value and the limit.

    >>> kvpack.formats.token_norms.stored_norm(torch.tensor([1.0001]), "F16", "norm")
    tensor([1.], dtype=torch.float16)
    """
    half = dtype == "F16"
    # Check the unrounded values in one pass: 65520 and above would round to infinity.
    if values.numel() and not values.abs().amax().item() < (HALF_LIMIT if half else math.inf):
        at = [int(i) for i in torch.nonzero(~(values.abs() < (HALF_LIMIT if half else math.inf)))[0]]
        raise ValueTooLarge(
            f"{name} at {at} is {values[tuple(at)].item():.6g}, but the largest "
            f"{'float16 value is 65504' if half else 'float32 value is 3.40282e+38'}: "
            f"scale the input, or choose {'fp32 norms or ' if half else ''}a raw codec"
        )
    return values.to(torch.float16 if half else torch.float32)


def encode_norms(values: torch.Tensor, norm: str, name: str) -> torch.Tensor:
    """Round float32 ``values`` to the stored form ``norm``. Raises ValueTooLarge if a value does not fit; the message calls it ``name``."""
    if norm != LOG8:
        return stored_norm(values, NORMS[norm], name)
    if values.numel() and not values.amax().item() < LOG8_LIMIT:
        at = [int(i) for i in torch.nonzero(~(values < LOG8_LIMIT))[0]]
        raise ValueTooLarge(
            f"{name} at {at} is {values[tuple(at)].item():.6g}, but the largest that fits in 8 bits is {MAX_LOG8:.6g}: scale the "
            "input, or choose norm=fp16"
        )
    return torch.bucketize(values, log8_bounds(values.device), right=True).to(torch.uint8)


def decode_norms(stored: torch.Tensor) -> torch.Tensor:
    """Convert ``stored`` norms to float32."""
    return log8_values(stored.device)[stored.to(torch.int64)] if stored.dtype == torch.uint8 else stored.to(torch.float32)


def norms_per_head(x: torch.Tensor) -> torch.Tensor:
    """Return the norm of each token in each head of ``x`` ``[batch, kv_head, token, dim]``: float32 ``[batch, kv_head, token]``."""
    # Other devices add without a float32 copy of the values, so they need no blocks.
    size = max(PAGE_TOKENS, BLOCK_VALUES // max(1, x.shape[0] * x.shape[1] * x.shape[3])) if x.device.type == "cpu" else max(1, x.shape[2])
    return torch.cat([torch.linalg.vector_norm(part, dim=3, dtype=torch.float32) for part in torch.split(x, size, 2)], 2)


def norms_over_heads(norms: torch.Tensor) -> torch.Tensor:
    """Return the norm of each token over all heads, ``[batch, token]``, from its norms in each head, ``[batch, kv_head, token]``."""
    return norms.square().sum(1).sqrt()


def median_norms(norms: torch.Tensor) -> torch.Tensor:
    """Return the median of ``norms`` ``[..., token]`` over the page of each token. NaN norms are ignored."""
    tokens, medians = norms.shape[-1], []
    for pages, count in _norm_pages(norms):
        median = pages.nanmedian(-1).values
        medians.append(median.repeat_interleave(PAGE_TOKENS, -1) if count == PAGE_TOKENS else median.expand(*norms.shape[:-1], count))
    return torch.cat([norms[..., tokens:], *medians], -1)


def find_large_sizes(sizes: torch.Tensor, ratio: float) -> torch.Tensor | None:
    """Return a mask of the ``sizes`` ``[..., token]`` that are above ``ratio`` times the typical size, or None if there are none.

    If the typical size is 0, as in padding, no size counts as large. NaN sizes are ignored, and the mask is False for them.
    """
    return large_size_mask(sizes, ratio) if has_large_size(sizes, ratio) else None


def large_size_mask(sizes: torch.Tensor, ratio: float) -> torch.Tensor:
    """Return the mask of ``find_large_sizes``, even if no size is large. The host does not wait for the device."""
    medians = median_norms(sizes)
    return (sizes > ratio * medians) & (medians > 0)


def measure_fit_errors(norms: torch.Tensor, shared: Collection[str]) -> torch.Tensor:
    """Measure how poorly each token fits the scales that it shares, as float32 ``[batch, token]``. Errors above 1 are unacceptable.

    ``norms`` ``[batch, kv_head, token]`` are the norms from which scales are computed. ``shared`` contains the units that share scales:
    ``HEADS``, ``TOKENS`` or both.
    """
    result = torch.zeros_like(norms[:, 0]) if HEADS not in shared else shared_scale_factors(norms) / SHARED_RATIO
    return result if TOKENS not in shared else torch.maximum(result, widening_factors(norms, shared) / GROUP_RATIO)


def widening_factors(norms: torch.Tensor, shared: Collection[str]) -> torch.Tensor:
    """Return the factor by which each token widens the typical range of its group, in the worst head: float32 ``[batch, token]``.

    A scale that heads share is divided out first. The factor is 0 for tokens whose norm is below ``GROUP_RATIO`` times the typical norm in
    every head.
    """
    none = torch.zeros_like(norms[:, 0])
    # One of two tokens is not an outlier.
    if norms.shape[2] < 3 or (HEADS not in shared and not has_large_size(norms, GROUP_RATIO)):
        return none
    medians = median_norms(norms)
    largest = torch.where(medians > 0, norms / medians, 0.0).amax(1)
    if HEADS in shared:
        scale = norms_over_heads(norms)
        largest = torch.where(scale > 0, largest / (scale / median_norms(scale)), 0.0)
    return torch.where(largest > GROUP_RATIO, largest, none)


def shared_scale_factors(norms: torch.Tensor) -> torch.Tensor:
    """Return the factor by which each token's shared scale exceeds what its worst-fitting head needs, float32 ``[batch, token]``.

    ``norms`` are the norms per head. The shared scale is proportional to the norm over all heads. A head needs the typical scale, or a
    larger one in proportion to its norm if that exceeds the typical norm. The factor is 0 for tokens whose shared scale is at most
    ``SHARED_RATIO`` times the typical scale.
    """
    scale = norms_over_heads(norms)
    medians = median_norms(scale)
    large = (scale > SHARED_RATIO * medians) & (medians > 0)
    if norms.shape[1] == 1 or not large.any():
        return torch.zeros_like(scale)
    return torch.where(large, scale / medians / relative_norms(norms).amin(1).clamp_min(1.0), 0.0)


def relative_norms(norms: torch.Tensor) -> torch.Tensor:
    """Divide norms by the typical norm of their head. If the typical norm is 0, the result is infinity."""
    medians = median_norms(norms)
    return torch.where(medians > 0, norms / medians, torch.inf)


def drop_crowded_pages(chosen: torch.Tensor, max_per_page: int = MAX_PER_PAGE) -> torch.Tensor:
    """Set ``chosen``, bool ``[batch, token]``, to False in pages with more than ``max_per_page`` chosen tokens."""
    batch, tokens = chosen.shape
    counts = functional.pad(chosen, (0, -tokens % PAGE_TOKENS)).reshape(batch, -1, PAGE_TOKENS).sum(2)
    return chosen & (counts <= max_per_page).repeat_interleave(PAGE_TOKENS, 1)[:, :tokens]


def _norm_pages(norms: torch.Tensor) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield blocks of norms ``[..., page, token]``, and the number of tokens at the end of each page that are compared with its median."""
    tokens = norms.shape[-1]
    whole = tokens // PAGE_TOKENS * PAGE_TOKENS
    if whole:
        yield norms[..., :whole].reshape(*norms.shape[:-1], whole // PAGE_TOKENS, PAGE_TOKENS), PAGE_TOKENS
    if whole < tokens:
        yield norms[..., max(0, tokens - PAGE_TOKENS) :].unsqueeze(-2), tokens - whole


def has_large_size(sizes: torch.Tensor, ratio: float) -> bool:
    """Return True if any of ``sizes`` ``[..., token]`` is above ``ratio`` times the median of its page. NaN sizes are ignored.

    A size is large if it is above ``ratio`` times more than half of the other sizes, so no median needs to be computed.
    """
    answer = compiled_has_large_size(sizes, ratio)
    if answer is not None:
        return answer
    for pages, count in _norm_pages(sizes):
        # This is also True for a page with NaN.
        may_exceed = ~(pages[..., -count:].amax(-1) <= ratio * pages.amin(-1))
        if may_exceed.any():
            wide_pages = pages[may_exceed]
            largest = wide_pages[..., -count:].nan_to_num(-torch.inf, posinf=torch.inf).amax(-1, keepdim=True)
            half = ((~wide_pages.isnan()).sum(-1) - 1 >> 1).clamp_min(0)
            if ((wide_pages * ratio < largest).sum(-1) > half).any():
                return True
    return False
