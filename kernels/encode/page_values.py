"""Kernels that read values in an inference engine's pages in place: their norms, largest magnitudes and exact copies.

One launch handles all pages.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import torch
import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import tile_origin

from .rows import BatchOffsets, launch_on_tiles, load_origin, move_pointer

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Integer dtypes by value size. Copying integers preserves all bits, including those of NaN."""


def copy_values(x: torch.Tensor, stream: torch.Tensor, origins: BatchOffsets, status: torch.Tensor | None) -> None:
    """Copy values ``x`` ``[batch, kv_head, token, dim]`` to ``stream``. The batch entries of ``x`` are at ``origins``.

    With ``status``, copy from ``stream`` to ``x`` instead, and only entries whose status is 0.
    """
    words = _WORDS[x.element_size()]
    launch_on_tiles(_copy, x.view(words), origins, stream.view(words), status)


def largest_magnitudes(x: torch.Tensor, origins: BatchOffsets, per_head: bool) -> torch.Tensor:
    """Return the largest magnitude in each sequence of ``x`` ``[batch, kv_head, token, dim]`` or, with ``per_head``, in each of its heads.

    The magnitudes are float32 ``[batch, kv_head or 1, 1]``. They are NaN if any value is NaN.
    """
    result = torch.zeros(x.shape[0], x.shape[1] if per_head else 1, 1, dtype=torch.int32, device=x.device)
    launch_on_tiles(_measure, x, origins, result, PER_TOKEN=False, PER_HEAD=per_head)
    return result.view(torch.float32)


def token_norms(x: torch.Tensor, origins: BatchOffsets) -> torch.Tensor:
    """Return the norm of each token in each head of ``x`` ``[batch, kv_head, token, dim]``: float32 ``[batch, kv_head, token]``."""
    result = torch.empty(x.shape[:3], dtype=torch.float32, device=x.device)
    launch_on_tiles(_measure, x, origins, result, PER_TOKEN=True, PER_HEAD=True)
    return result


@triton.jit
def _measure(
    x: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    origins: tl.tensor,
    result: tl.tensor,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PER_HEAD: tl.constexpr,
) -> None:
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    origin = load_origin(origins, batch, ALIGNED)
    token = first + tl.arange(0, BLOCK_TOKENS)
    channel = tl.arange(0, CHANNELS)[None, :]
    place = x + origin.input + head * head_stride + token[:, None] * token_stride + channel.to(tl.int64) * channel_stride
    value = tl.load(place, (token[:, None] < tokens) & (channel < DIM), 0).to(tl.float32)
    if PER_TOKEN:
        tl.store(result + (batch * heads + head) * tokens + token, tl.sqrt(tl.sum(value * value, 1)), token < tokens)
    else:
        # The bits of magnitudes have the same order as the values, and the bits of NaN exceed all of them.
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(result + (batch * heads + head if PER_HEAD else batch), tl.max(tl.max(bits, 1), 0))


@triton.jit
def _copy(
    x: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    origins: tl.tensor,
    stream: tl.tensor,
    status: tl.tensor,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    origin = load_origin(origins, batch, ALIGNED)
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    inside = (token < tokens) & (channel < DIM)
    place = x + origin.input + head * head_stride + token * token_stride + channel.to(tl.int64) * channel_stride
    row = move_pointer(stream, origin.streams) + (head * tokens + token) * DIM + channel
    if status is None:
        tl.store(row, tl.load(place, inside, 0), inside)
    else:
        inside = inside & (tl.load(status + origin.flag) == 0)
        tl.store(place, tl.load(row, inside, 0), inside)
