"""Norms of the tokens of an engine's pages, read in place: one launch for a whole job."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.kernels.bitpack.columns import launch, tile_origin
from kvpack.kernels.encode.rows import load_origin

if TYPE_CHECKING:
    from kvpack.kernels.encode.rows import Origins

TILE_VALUES = 1 << 12
WARPS = 4


def token_norms(x: torch.Tensor, origins: Origins) -> torch.Tensor:
    """Return the norm of each token of ``x`` ``[batch, kv_head, token, dim]`` in each head: float32 ``[batch, kv_head, token]``."""
    batch, heads, tokens, dim = x.shape
    channels = next_power_of_two(dim)
    block = max(1, min(TILE_VALUES // channels, next_power_of_two(tokens)))
    result = torch.empty(batch, heads, tokens, dtype=torch.float32, device=x.device)
    launch(
        _norms, batch * heads * -(-tokens // block), x.device, x, *x.stride()[1:], heads, tokens, origins.table, result,
        DIM=dim, CHANNELS=channels, ALIGNED=max(1, origins.aligned // x.element_size()), BLOCK_TOKENS=block, warps=WARPS,
    )  # fmt: skip
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
