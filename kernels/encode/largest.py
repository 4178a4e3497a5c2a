"""Largest magnitudes of an inference engine's pages, from which page or head scales are chosen, in one launch for all pages."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import tile_origin

from .rows import launch_on_tiles, load_origin

if TYPE_CHECKING:
    from .rows import BatchOffsets

def largest_magnitudes(x: torch.Tensor, origins: BatchOffsets, per_head: bool) -> torch.Tensor:
    """Return the largest magnitude in each sequence of ``x`` ``[batch, kv_head, token, dim]``, or in each head with ``per_head``.

    The result is float32 ``[batch, kv_head or 1, 1]``. It is NaN if any of the values is NaN.
    """
    result = torch.zeros(x.shape[0], x.shape[1] if per_head else 1, 1, dtype=torch.int32, device=x.device)
    launch_on_tiles(_largest_kernel, x, origins, result, PER_HEAD=per_head)
    return result.view(torch.float32)


@triton.jit
def _largest_kernel(
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
    PER_HEAD: tl.constexpr,
) -> None:
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    origin = load_origin(origins, batch, ALIGNED)
    token = (first + tl.arange(0, BLOCK_TOKENS))[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    address = x + origin.input + head * head_stride + token * token_stride + channel.to(tl.int64) * channel_stride
    value = tl.load(address, (token < tokens) & (channel < DIM), 0).to(tl.float32)
    # The bits of magnitudes have the same order as the values, and the bits of NaN exceed all of them.
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(result + (batch * heads + head if PER_HEAD else batch), tl.max(tl.max(bits, 1), 0))
