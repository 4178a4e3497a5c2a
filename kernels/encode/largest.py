"""Largest magnitudes of an inference engine's pages, from which page or head scales are chosen, in one launch for all pages."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.formats.columns import next_power_of_two
from kvpack.kernels.bitpack.columns import launch, tile_origin

from .rows import load_origin

if TYPE_CHECKING:
    from .rows import Origins

TILE_VALUES = 1 << 12
WARPS = 4


def largest_magnitudes(x: torch.Tensor, origins: Origins, per_head: bool) -> torch.Tensor:
    """Return the largest magnitude in each sequence of ``x`` ``[batch, kv_head, token, dim]``, or in each head with ``per_head``.

    The result is float32 ``[batch, kv_head or 1, 1]``; it is NaN wherever a value is NaN.
    """
    batch, heads, tokens, dim = x.shape
    channels = next_power_of_two(dim)
    block = max(1, min(TILE_VALUES // channels, next_power_of_two(tokens)))
    result = torch.zeros(batch, heads if per_head else 1, 1, dtype=torch.int32, device=x.device)
    launch(
        _largest_kernel, batch * heads * -(-tokens // block), x.device, x, *x.stride()[1:], heads, tokens, origins.table, result,
        DIM=dim, CHANNELS=channels, ALIGNED=max(1, origins.aligned // x.element_size()), BLOCK_TOKENS=block, PER_HEAD=per_head, warps=WARPS,
    )  # fmt: skip
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
