"""channel_scale: divides each channel of a head by a stored factor before encoding (spec/side-cars.md).

In many models, a few channels of the keys are far larger than the others. A rotation would spread them over all channels, and every code
would have to describe them. Dividing them out costs one number per channel, head and run, which attention folds into the query.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .errors import InvalidParameter, InvalidPayload
from .lazy import functional, numpy, torch
from .sidecar import ValueMap, parse_choice
from .streams import NORMS, Layout
from .value_blocks import first_index, value_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .options import Options
    from .runs import Run
    from .value_blocks import Array

STREAM = "channel_scale"

_ORDINARY_RATIO = 4.0
"""A channel stays unscaled if its root mean square is at most this multiple of the median channel's."""

_ORDINARY_RATIO_WITH_MEANS = 10.0
"""Replaces ``_ORDINARY_RATIO`` if page means are subtracted. Queries vary in the same channels as keys, so errors in large channels matter
more.
"""

_MAX_FACTOR = 65504.0

BALANCED = "balanced"
"""Option value that requests factors computed from keys and queries."""

_MIN_WEIGHT = 2.0**-10
"""Minimum weight of a channel, relative to the average. Its inverse is the maximum balanced factor."""

_MAX_MEAN_RATIO = 8.0
"""Maximum ratio assumed between a channel's mean square with and without page means. Key biases, which cause larger ratios, do not predict
query sizes.
"""

SPAN_TOKENS = 16
"""Number of tokens per span. The root mean square of a span is one sample."""


@dataclass(frozen=True)
class ChannelScale(ValueMap):
    """Sidecar that divides each channel by a factor, which is stored as ``dtype``.

    If ``paired``, the channels j and j + dim / 2, which RoPE mixes, share the larger of their factors. With ``queries``, the mean square of
    each query channel (float32 ``[kv_head, dim]``), the factors make keys and queries equally large in every channel.
    """

    name: ClassVar[str] = "channel_scale"
    words: ClassVar[tuple[str, ...]] = ("channel_scale",)

    dim: int
    dtype: str
    paired: bool = field(default=True, compare=False)
    queries: torch.Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_options(cls, dim: int, side: str, options: Options) -> Self | None:
        dtype = options.choice("channel_scale", "", (*NORMS, BALANCED))
        if dtype != BALANCED:
            return cls(dim, dtype, paired=side == "k") if dtype else None
        options.text("basis")
        if side != "k":
            raise InvalidParameter(
                f"codec {options.codec}: channel_scale=balanced applies to keys only: set it in k=<codec>, and omit it from v=<codec>"
            )
        if options.is_given("frame"):
            raise InvalidParameter(f"codec {options.codec}: frame= already balances the channels: omit channel_scale=balanced")
        balanced = options.balanced
        queries = None if balanced is None else balanced.queries
        if queries is not None and queries.shape[1] != dim:
            raise InvalidParameter(
                f"codec {options.codec}: the head dim is {dim}, but the basis is for head dim {queries.shape[1]}: use a basis for this "
                "model"
            )
        return cls(dim, "fp16", queries=queries)

    @classmethod
    def from_params(cls, dim: int, value: Any) -> Self:
        return cls(dim, parse_choice(cls.name, value, NORMS))

    def params(self) -> str:
        return self.dtype

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        return {STREAM: Layout(NORMS[self.dtype], (batch, heads, 1, self.dim), per="run")}

    def measure(self, run: Run) -> dict[str, torch.Tensor]:
        """Choose the run's factors, ``[batch, kv_head, 1, dim]``.

        The factor of a channel is max(1, r / 4), where r is the channel's rms divided by the rms of the median channel. The rms of a
        channel is the median over spans of 16 tokens, because an outlier in one token would otherwise scale down all other tokens. If page
        means are subtracted, the factors are max(1, min((r / 10)^6, 3 sqrt(r))), times ``_mean_factors``. Balanced factors are proportional
        to (E[k^2] / E[q^2])^(1/4) of the channel, with a geometric mean of 1.
        """
        if run.span_squares is not None:
            centered, whole = run.span_squares()
        else:
            whole = None if run.whole is None or self.queries is not None else _span_squares(run, run.whole)
            centered = _span_squares(run, run.blocks)
        if self.queries is not None:
            return {STREAM: _balanced_factors(centered.mean(2, keepdim=True) / SPAN_TOKENS, self.queries).to(torch.float16)}
        squares = _median(centered)
        size = squares.sqrt()
        median = size.median(3, keepdim=True).values
        # If half of the channels are zero, the size of an ordinary channel is unknown.
        ratio = torch.where(median > 0, size / median, 1.0)
        if self.paired and self.dim % 2 == 0:
            low, high = ratio.chunk(2, 3)
            ratio = torch.maximum(low, high).repeat(1, 1, 1, 2)
        if whole is None:
            factor = (ratio / _ORDINARY_RATIO).clamp_min(1.0)
        else:
            # The function is steep, so that few channels stay large. Queries may be large in the same channels, so the square
            # root limits it.
            factor = torch.minimum((ratio / _ORDINARY_RATIO_WITH_MEANS) ** 6, 3 * ratio.sqrt()).clamp_min(1.0)
            if self.dim % 2 == 0:
                factor = factor * _mean_factors(squares, _median(whole))
        return {STREAM: factor.clamp_max(_MAX_FACTOR).to(torch.float16 if self.dtype == "fp16" else torch.float32)}

    def forward(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return x / factors(streams)

    def inverse(self, x: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return x * factors(streams)

    def query(self, q: torch.Tensor, streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return q * factors(streams)

    def check(self, arrays: Mapping[str, Array], where: str) -> None:
        """Raise InvalidPayload unless every factor is finite and above 0."""
        factors = arrays[STREAM]
        for first, block in value_blocks(factors):
            invalid = ~((block > 0) & numpy.isfinite(block))
            if invalid.any():
                at = first_index(invalid, first, factors.shape)
                raise InvalidPayload(f"{where}.{STREAM}: the value at {at} is {block[invalid.argmax()]}, expected a finite number above 0")


def _span_squares(run: Run, blocks: Callable[[], Iterator[torch.Tensor]]) -> torch.Tensor:
    """Return the sum of squares of each channel over each span of 16 tokens, float64 ``[batch, kv_head, span, dim]``.

    The sums of a shorter last span are scaled up to 16 tokens.
    """
    batch, heads, tokens, dim = run.shape
    squares = torch.zeros(batch, heads, max(1, -(-tokens // SPAN_TOKENS)), dim, dtype=torch.float64, device=run.device)
    start = 0
    for block in blocks():
        first, before = divmod(start, SPAN_TOKENS)
        start += block.shape[2]
        spans = functional.pad(block, (0, 0, before, -start % SPAN_TOKENS)).reshape(batch, heads, -1, SPAN_TOKENS, dim)
        squares[:, :, first : first + spans.shape[2]] += spans.to(torch.float64).square_().sum(3)
    squares[:, :, -1] *= SPAN_TOKENS / ((tokens - 1) % SPAN_TOKENS + 1)
    return squares


def _median(squares: torch.Tensor) -> torch.Tensor:
    """Return the lower median over spans of ``squares``, ``[batch, kv_head, span, dim]``: ``[batch, kv_head, 1, dim]``."""
    if squares.device.type != "cpu":
        return squares.median(2, keepdim=True).values
    # NumPy's partition takes a sixth of the time of PyTorch's median.
    middle = (squares.shape[2] - 1) // 2
    return torch.from_numpy(numpy.partition(squares.transpose(2, 3).numpy(), middle, 3)[..., None, :, middle].copy())


def _mean_factors(centered: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return factors for keys whose page means are subtracted. The smallest factor is 1.

    ``centered`` contains the mean squares of keys without their page means, and ``whole`` the mean squares of whole keys, ``[batch,
    kv_head, 1, dim]`` each. Queries are unknown, but in each pair of channels that RoPE rotates, they are about as large as whole keys.
    Balanced factors are therefore proportional to (``centered`` / ``whole``)^(1/4).
    """
    centered, whole = (torch.stack(squares.chunk(2, 3)).sum(0).repeat(1, 1, 1, 2) for squares in (centered, whole))
    share = torch.where(whole > 0, centered / whole, 1.0).clamp(1 / _MAX_MEAN_RATIO, 1.0)
    return (share / share.amin(3, keepdim=True)) ** 0.25


def _balanced_factors(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return the balanced factors for the mean squares of ``keys``, ``[batch, kv_head, 1, dim]``, and ``queries``, ``[kv_head, dim]``.

    A mean square of less than 2^-10 of the average is replaced by 2^-10 of the average. Raises InvalidParameter if ``queries`` has a
    different number of heads.
    """
    if len(queries) != keys.shape[1]:
        raise InvalidParameter(
            f"the basis has query statistics for {len(queries)} heads, but the keys have {keys.shape[1]} heads: use a basis for this model"
        )
    query = queries.to(keys.device, keys.dtype)[None, :, None]
    parts = [torch.where(total > 0, x / total, 1.0).clamp_min(_MIN_WEIGHT) for x in (keys, query) for total in (x.mean(3, keepdim=True),)]
    scale = (parts[0].log2() - parts[1].log2()) / 4
    return torch.exp2(scale - scale.mean(3, keepdim=True))


def factors(streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the stored factors, float32 ``[batch, kv_head, 1, dim]``."""
    return streams[STREAM].to(torch.float32)
