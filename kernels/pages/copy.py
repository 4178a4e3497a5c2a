"""Copying of values, unchanged, between an inference engine's page slots and packed rows."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import tile_origin
from kvpack.kernels.encode.rows import launch_on_tiles, load_origin, move_pointer

if TYPE_CHECKING:
    from kvpack.kernels.encode.rows import BatchOffsets

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Integer dtypes by value size. Copying integers preserves all bits, including those of NaN."""


def copy(x: torch.Tensor, stream: torch.Tensor, origins: BatchOffsets, status: torch.Tensor | None) -> None:
    """Copy values ``x`` ``[batch, kv_head, token, dim]`` to ``stream`` for each batch entry.

    If ``status`` is given, copy in the other direction, and only for entries with status 0.
    """
    words = _WORDS[x.element_size()]
    launch_on_tiles(_copy, x.view(words), origins, stream.view(words), status)


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
