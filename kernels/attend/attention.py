"""attend on the GPU: split-K flash decoding over packed rows, then a merge of the partial results.

Sources: FlashAttention's running softmax; flash decoding's split of the tokens with a log-sum-exp merge; OCTOPUS Eq. 13 for queries and
values in the coded frame.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvpack.kernels.tiles import addresses

from . import plan, segments
from .prepared import MAX_ROWS, Options, Prepared, QueryShape

if TYPE_CHECKING:
    import torch

    from kvpack.kernels.tiles.layers import Layer

MAX_DUAL_ROWS = 8
"""Up to which two tokens may share a row of a tile: each has query rows of its own."""

MAX_SPLIT_ROW_BLOCKS, MAX_ROW_BLOCKS, MAX_BLOCK_TOKENS = 6, 32, 6 << 16
"""Maximum number of query-row blocks for the split kernel, each of which decodes the layer again: always allowed; with few tokens; and
times tokens in that case. With more blocks, tokens are decoded to a scratch first (``many_queries``).

On an H200, 65,536 tokens took 28 us (4-bit groups) to 45 us (octahedral) for each block of rows, and 250 us decoded first, for which
the host takes as long however few tokens there are.
"""

_prepared: WeakKeyDictionary[Layer, dict[Any, Prepared]] = WeakKeyDictionary()


def supports(q: torch.Tensor, layer: Layer) -> bool:
    """Return True if these kernels support the layer: every segment has a tile loader, and each KV head has few query rows."""
    k, v = layer.k, layer.v
    assert k is not None
    assert v is not None
    blocks = -(-q.shape[1] // k.heads * q.shape[2] // MAX_ROWS)
    few = blocks <= MAX_SPLIT_ROW_BLOCKS or (blocks <= MAX_ROW_BLOCKS and blocks * k.tokens <= MAX_BLOCK_TOKENS)
    if not few or not q.device == k.device == v.device:
        return False
    return segments.of_side(k).supported and segments.of_side(v).supported


def attend(
    q: torch.Tensor,
    layer: Layer,
    scale: float,
    causal: bool = True,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sink_logits: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run ``kvpack.attend``, with its checked arguments, over a layer that ``supports`` accepts."""
    options = Options(scale, causal, softcap, sliding_window, lengths is not None, sink_logits is not None, starts is not None)
    return prepare(q, layer, options)(q, sink_logits, lengths, starts)


def prepare(q: torch.Tensor, layer: Layer, options: Options) -> Prepared:
    """Prepare softmax(scale q k^T) v over a layer that ``supports`` accepts, for queries like ``q``; the result is cached with the layer.

    Tiles are binary16 (raw ones have their own dtype) and sums float32: the result is within 2e-3 of the exact one in the 2-norm, as long
    as no decoded value is above 65504. Calling the result neither waits for the device nor reads anything from it, so that a CUDA graph can
    contain the call.
    """
    kept = _prepared.setdefault(layer, {})
    request = (q.shape, q.dtype, options, os.environ.get(addresses.VARIABLE))
    if request not in kept:
        kept[request] = _prepare(q, layer, options)
    return kept[request]


def _prepare(q: torch.Tensor, layer: Layer, options: Options) -> Prepared:
    k, v = layer.k, layer.v
    assert k is not None
    assert v is not None
    batch, q_heads, q_len, dim = q.shape
    shape = QueryShape(batch, q_heads, q_len, dim, k.heads)
    position = k.tokens - shape.q_len
    begin, end = 0, position + shape.q_len if options.causal else k.tokens
    whole = 0, position + 1 if options.causal else k.tokens
    window = options.sliding_window
    if window and not options.lengths:
        begin, whole = max(0, position - window + 1), (max(0, k.tokens - window), whole[1])
    elif window and not options.starts:
        # Each sequence has a window of its own: its tokens are masked.
        whole = end, end
    dual = shape.rows <= MAX_DUAL_ROWS and not (segments.of_side(k).outliers or segments.of_side(v).outliers)
    launches = plan.launches(k, v, layer, begin, end, whole, shape.padded // shape.block, dual)
    return Prepared(launches, shape, q.dtype, options, position, dual, v.dim, [options.lengths] * len(launches))
