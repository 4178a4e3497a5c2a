"""Attention on the GPU for few queries: split-K flash decoding over packed tokens, then a merge of the partial results.

Sources: FlashAttention's running softmax; flash decoding's split of the tokens with a log-sum-exp merge; OCTOPUS Eq. 13 for queries and
values in the coded frame.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvpack.kernels.tiles import addresses, frame_columns, loaders
from kvpack.kernels.tiles.layers import Layer, keys_and_values

from . import plan, segments
from .prepared import MAX_ROWS, AttendOptions, PreparedCall, QueryShape, supports_scalar_kernel

if TYPE_CHECKING:
    import torch

    from kvpack.kernels.tiles.layers import Side


MAX_DUAL_ROWS = 8
"""Maximum number of query rows per KV head for dual tiles, which need a copy of the query rows for each of their two tokens."""

MAX_PAIRED_ROWS = 4
"""Maximum number of query rows per KV head for paired tiles, which need each row twice among the 8 columns of a matrix instruction."""

MAX_SPLIT_ROW_BLOCKS, MAX_ROW_BLOCKS, MAX_BLOCK_TOKENS = 6, 32, 6 << 16
"""Limits of the split kernel: row blocks that are always supported, maximum row blocks, and maximum row blocks times tokens.

The kernel decodes the layer once per block of query rows. Calls above the limits use ``many_queries``, which decodes the tokens to a
scratch buffer first. On an H200, 65,536 tokens took 28 us (4-bit groups) to 45 us (octahedral) per block, and 250 us with a scratch buffer.
Most of the 250 us is host time, even with fewer tokens.
"""

_prepared: WeakKeyDictionary[Layer, dict[Any, PreparedCall]] = WeakKeyDictionary()


def supports(q: torch.Tensor, layer: Layer) -> bool:
    """Return True if the split-K kernel supports this call.

    Every segment of the layer must have a tile loader, and each KV head must have few query rows.
    """
    k, v = keys_and_values(layer)
    blocks = -(-q.shape[1] // k.heads * q.shape[2] // MAX_ROWS)
    few = blocks <= MAX_SPLIT_ROW_BLOCKS or (blocks <= MAX_ROW_BLOCKS and blocks * k.tokens <= MAX_BLOCK_TOKENS)
    if not few or not q.device == k.device == v.device:
        return False
    return segments.side_segments(k).supported and segments.side_segments(v).supported


def choose_loaders(rows: int, k: Side, v: Side) -> int:
    """Return the kind of tile loader to prefer: ``frame_columns.PAIRED``, ``frame_columns.DUAL``, or 0 for ordinary loaders.

    ``rows`` is the number of query rows per KV head.
    """
    sides = [segments.side_segments(side) for side in (k, v)]
    if rows > MAX_DUAL_ROWS or any(side.outliers for side in sides):
        return 0
    # The second half of the rows cannot be for second tokens of keys and for second fields of values.
    has_dual_keys = any(loaders.find_dual_tiles(segment.frame.codec) for segment in sides[0].segments)
    return frame_columns.PAIRED if rows <= MAX_PAIRED_ROWS and not has_dual_keys else frame_columns.DUAL


def prepare(q: torch.Tensor, layer: Layer, options: AttendOptions) -> PreparedCall:
    """Prepare softmax(scale q k^T) v over a supported ``layer``, for queries shaped like ``q``. The prepared call is cached with the layer.

    Tiles are float16 (raw tokens keep their dtype), and sums are float32. The relative error in the 2-norm is at most 2e-3 if no decoded
    value exceeds 65504. The call never synchronizes with the device, so CUDA graphs can capture it.
    """
    calls = _prepared.setdefault(layer, {})
    key = (q.shape, q.dtype, options, os.environ.get(addresses.VARIABLE))
    if key not in calls:
        calls[key] = _prepare(q, layer, options)
    return calls[key]


def _prepare(q: torch.Tensor, layer: Layer, options: AttendOptions) -> PreparedCall:
    k, v = keys_and_values(layer)
    batch, q_heads, q_len, dim = q.shape
    shape = QueryShape(batch, q_heads, q_len, dim, k.heads)
    position = k.tokens - shape.q_len
    begin, end = 0, position + shape.q_len if options.causal else k.tokens
    always_visible = 0, position + 1 if options.causal else k.tokens
    window = options.sliding_window
    if window and not options.lengths:
        begin, always_visible = max(0, position - window + 1), (max(0, k.tokens - window), always_visible[1])
    elif window and not options.starts:
        # Each sequence has its own window, so all tokens need the mask.
        always_visible = end, end
    dual = choose_loaders(shape.rows, k, v)
    same_tokens = supports_scalar_kernel(shape, options)
    launches = plan.launches(k, v, layer, begin, end, always_visible, shape.padded // shape.block, dual, same_tokens)
    return PreparedCall(launches, shape, q.dtype, options, position, dual, v.dim, [options.lengths] * len(launches))
