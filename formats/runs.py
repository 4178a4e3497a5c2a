"""Runs: tokens that are encoded together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch


@dataclass(frozen=True)
class Run:
    """The tokens to encode as one run, for codecs that must see all tokens before they encode the first.

    Attributes:
        shape: ``(batch, kv_head, token, dim)``.
        device: Device of the values.
        blocks: Returns a new iterator over the values, finite float32 ``[batch, kv_head, token, dim]`` in token order.
        position: Position of the first token in its sequence, if known.
        norms: Norms of the layer's keys in each head, float32 ``[batch, kv_head, token]``, if known.
        whole: Like ``blocks``, but before page vectors are subtracted. None if no page vectors are subtracted.
        span_squares: Returns the sums that ``ChannelScale`` computes from ``blocks`` and from ``whole``, if a kernel can add them up: each
            channel's sum of squares over spans of ``SPAN_TOKENS`` tokens, float64 ``[batch, kv_head, span, dim]``.

    >>> x = torch.randn(1, 2, 10, 64)
    >>> run = kvpack.formats.runs.Run((1, 2, 10, 64), x.device, lambda: iter([x]))
    >>> [block.shape[2] for block in run.blocks()]
    [10]
    """

    shape: tuple[int, int, int, int]
    device: torch.device
    blocks: Callable[[], Iterator[torch.Tensor]]
    position: int | None = None
    norms: torch.Tensor | None = None
    whole: Callable[[], Iterator[torch.Tensor]] | None = None
    span_squares: Callable[[], tuple[torch.Tensor, torch.Tensor | None]] | None = None


@dataclass(frozen=True)
class RunEncoder:
    """Encoder of one run, returned by ``Codec.begin``.

    Attributes:
        streams: The streams with one row per run.
        encode: ``encode(block, start)`` returns the other streams of a block, finite float32 ``[batch, kv_head, token, dim]``. The number
            of its first token, ``start``, is a multiple of ``Codec.group_tokens``.

    >>> codec = kvpack.pack(past, "k=group:b=2;v=group:b=2;raw=0")[0].k.codec
    >>> x = torch.randn(1, 2, 64, 64)
    >>> run = kvpack.formats.runs.Run((1, 2, 64, 64), x.device, lambda: iter([x]))
    >>> list(codec.begin(run, None).encode(x, 0))
    ['codes.0', 'scales']
    """

    streams: Mapping[str, torch.Tensor]
    encode: Callable[[torch.Tensor, int], dict[str, torch.Tensor]]
