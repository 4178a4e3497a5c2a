"""Norms of the tokens of an engine's pages. The values are read in place, with one launch for a whole job."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import tile_origin
from kvpack.kernels.encode.rows import launch_on_tiles, load_origin

if TYPE_CHECKING:
    from kvpack.kernels.encode.rows import BatchOffsets

def token_norms(x: torch.Tensor, origins: BatchOffsets) -> torch.Tensor:
    """Return the norm of each token of ``x`` ``[batch, kv_head, token, dim]`` in each head: float32 ``[batch, kv_head, token]``."""
    result = torch.empty(x.shape[:3], dtype=torch.float32, device=x.device)
    launch_on_tiles(_norms, x, origins, result)
    return result


@triton.jit
def _norms(
    x: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    channel_stride: tl.tensor,
    heads: tl.tensor,
    tokens: tl.tensor,
    origins: tl.tensor,
    norms: tl.tensor,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
) -> None:
    batch, head, first = tile_origin(heads, tokens, BLOCK_TOKENS)
    origin = load_origin(origins, batch, ALIGNED)
    token = first + tl.arange(0, BLOCK_TOKENS)
    channel = tl.arange(0, CHANNELS)[None, :]
    place = x + origin.input + head * head_stride + token[:, None] * token_stride + channel.to(tl.int64) * channel_stride
    value = tl.load(place, (token[:, None] < tokens) & (channel < DIM), 0).to(tl.float32)
    tl.store(norms + (batch * heads + head) * tokens + token, tl.sqrt(tl.sum(value * value, 1)), token < tokens)
