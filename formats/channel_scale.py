"""channel_scale: each channel of a head divided by a factor before anything else is done with it (spec/side-cars.md).

Keys of many models have a few channels far larger than the others; a rotation spreads them over all, and every code then
describes them. Dividing them out costs one number per channel, head and run, which attention folds into the query.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Self

from .base import NORMS, Layout
from .errors import InvalidPayload
from .lazy import functional, numpy, torch
from .side_car import ValueMap, known_word
from .value_blocks import first_place, value_blocks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from .base import Run
    from .options import Options
    from .value_blocks import Array

STREAM = "channel_scale"

_ORDINARY = 4.0
"""A channel up to this many times the median root mean square is not scaled."""

_LARGEST = 65504.0

_SPAN = 16
"""Tokens whose root mean square counts once."""


@dataclass(frozen=True)
class ChannelScale(ValueMap):
    """Factors stored as ``dtype``; ``paired`` gives the channels j and j + dim / 2, which RoPE mixes, the larger factor of the two."""

    name: ClassVar[str] = "channel_scale"
    words: ClassVar[tuple[str, ...]] = ("channel_scale",)

    dim: int
    dtype: str
    paired: bool = field(default=True, compare=False)

    @classmethod
    def of_words(cls, dim: int, side: str, options: Options) -> Self | None:
        dtype = options.choice("channel_scale", "", tuple(NORMS))
        return cls(dim, dtype, paired=side == "k") if dtype else None

    @classmethod
    def of_params(cls, dim: int, value: Any) -> Self:
        return cls(dim, known_word(cls.name, value, NORMS))

    def params(self) -> str:
        return self.dtype

    def layout(self, batch: int, heads: int, tokens: int) -> dict[str, Layout]:
        """The stream ``channel_scale``."""
        return {STREAM: Layout(NORMS[self.dtype], (batch, heads, 1, self.dim), per="run")}

    def measure(self, run: Run) -> dict[str, torch.Tensor]:
        """The factors ``[batch, kv_head, 1, dim]`` of a run: max(1, rms / (4 median rms)), where rms is a channel's root mean square.

        It is that of the median of spans of 16 tokens: an outlier in one token would scale the channel of all others.
        """
        batch, heads, tokens, dim = run.shape
        squares = torch.zeros(batch, heads, max(1, -(-tokens // _SPAN)), dim, dtype=torch.float64, device=run.device)
        start = 0
        for block in run.blocks():
            first, before = divmod(start, _SPAN)
            start += block.shape[2]
            spans = functional.pad(block, (0, 0, before, -start % _SPAN)).reshape(batch, heads, -1, _SPAN, dim)
            norms = torch.linalg.vector_norm(spans, dim=3, dtype=torch.float64)
            squares[:, :, first : first + norms.shape[2]] += norms.square()
        squares[:, :, -1] *= _SPAN / ((tokens - 1) % _SPAN + 1)
        size = squares.median(2, keepdim=True).values.sqrt()
        ordinary = _ORDINARY * size.median(3, keepdim=True).values
        # If half of the channels are zero, the size of an ordinary channel is unknown.
        factor = torch.where(ordinary > 0, size / ordinary, 1.0).clamp(1.0, _LARGEST)
        if self.paired and factor.shape[3] % 2 == 0:
            low, high = factor.chunk(2, 3)
            factor = torch.maximum(low, high).repeat(1, 1, 1, 2)
        return {STREAM: factor.to(torch.float16 if self.dtype == "fp16" else torch.float32)}

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
            odd = ~((block > 0) & numpy.isfinite(block))
            if odd.any():
                at = first_place(odd, first, factors.shape)
                raise InvalidPayload(f"{where}.{STREAM}: the value at {at} is {block[odd.argmax()]}, channel scales are finite and above 0")


def factors(streams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The stored factors, float32 ``[batch, kv_head, 1, dim]``."""
    return streams[STREAM].to(torch.float32)
