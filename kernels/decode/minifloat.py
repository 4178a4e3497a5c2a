"""Decode packed rows of minifloat to values in one pass (spec/codecs/minifloat.md); ``formats/minifloat.py`` is the oracle."""

# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.kernels.bitpack.minifloats import E2M1_EXPONENT, e4m3_as_f16, elements_as_f16

from . import rows
from .digits import code_streams, load_digit
from .rows import as_float32, load_block, load_per_token, rows_from
from .stored import store_tile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.minifloat import Minifloat

    from .rows import Packed, Pages, Prepared


def prepare(codec: Minifloat, packed: Sequence[Packed], out: torch.Tensor, rotated: bool, pages: Pages | None = None) -> Prepared | None:
    """Return the launch that decodes ``packed``, with streams of any strides, into ``out`` ``[batch, kv_head, token, dim]`` with dense
    channels.

    In float32 the values are those of ``Minifloat.decode_frame``, bit for bit; ``rotated`` says nothing, because there is no rotation.
    Raises InvalidParameter if a stream is not as ``codec.layout`` says.
    """
    rows.check(codec, packed, *out.shape[:2])
    layout = codec.row_layouts
    names = list(layout)
    channels = rows.channels_of(codec.dim, False)
    tile = rows.tile_tokens(channels, False)
    per_row = [1 if layout[name].per == "token" else rows.ONE_ROW for name in names]
    streams = [([part.streams[name] for name in names], part.tokens, part.first) for part in packed]
    batch, heads = out.shape[:2]
    work = rows.work_of(streams, per_row, batch * heads, tile, out.device, pages)
    in_blocks = codec.granularity == "block"
    return rows.prepared(
        _decode, work, out,
        CODE=code_streams(codec)[0], ELEMENT=codec.element, SCALE=names.index("block_scales" if in_blocks else "scale"),
        GLOBAL_SCALE=len(names) - 1 if codec.run_scale == "global_scale" else -1, SIZE=codec.block if in_blocks else 0,
        PER_TOKEN=codec.granularity == "token", ROTATED=False, DIM=codec.dim, TILE=tile, CHANNELS=channels,
    )  # fmt: skip


@triton.jit
def _power(exponent: tl.tensor) -> tl.tensor:
    """2 to the power of ``exponent``, int32 from -126 to 127, float32."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["blocks", "heads", "block_tokens"])
def _decode(
    out: tl.tensor,
    table: tl.tensor,
    status: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    blocks: tl.tensor,
    heads: tl.tensor,
    block_tokens: tl.tensor,
    STREAMS: tl.constexpr,
    INTEGERS: tl.constexpr,
    PAGED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr,
    CODE: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    GLOBAL_SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ROTATED: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Decode the block of one program, tile by tile: ``[token, channel]`` of codes, and scales that are broadcast to it.

    ``GLOBAL_SCALE`` is the number of its stream, -1 for none; ``SIZE`` the channels of a block, 0 if scales are not of blocks.
    """
    block = load_block(out, table, status, batch_stride, head_stride, token_stride, blocks, heads, STREAMS, INTEGERS, PAGED, OUT_ALIGNED)
    token = tl.arange(0, TILE)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    for begin in range(0, block_tokens, TILE):
        count = block.count - begin
        streams = rows_from(block.streams, begin, STREAMS)
        mask = (token < count) & (channel < DIM)
        code = load_digit(streams, token, channel, mask, CODE, 0)
        value = elements_as_f16(code, 0, ELEMENT, False).to(tl.float32)
        if ELEMENT == "e2m1":
            value = value * 2.0**E2M1_EXPONENT
        if SIZE == 0 and PER_TOKEN:
            value = value * load_per_token(streams[SCALE], count, TILE, 1, 0)
        elif SIZE == 0:
            value = value * as_float32(tl.load(streams[SCALE]))
        else:
            BLOCKS: tl.constexpr = (DIM + SIZE - 1) // SIZE
            scales = tl.load(streams[SCALE] + (token * BLOCKS + channel // SIZE), mask, 0).to(tl.int32) & 0xFF
            if GLOBAL_SCALE >= 0:
                # The product of both has at most six significant bits.
                value = value * e4m3_as_f16(scales).to(tl.float32) * as_float32(tl.load(streams[GLOBAL_SCALE]))
            else:
                # Two normal numbers: the smallest of their products is subnormal, and would be none as a factor.
                half = scales >> 1
                value = value * _power(half - 63) * _power(scales - half - 64)
        store_tile(block.out + begin * token_stride, token_stride, token, channel, count, value, DIM)
