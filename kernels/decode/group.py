"""Decode packed rows of group to values in one pass (spec/codecs/group.md); ``formats/group.py`` is the oracle."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from . import rows
from .digits import code_streams, load_digit
from .rows import as_float32, load_block, load_per_token, rows_from
from .stored import load_signs, original, signs_of, store_tile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.group import Group

    from .rows import Packed, Pages, Prepared


def prepare(codec: Group, packed: Sequence[Packed], out: torch.Tensor, rotated: bool, pages: Pages | None = None) -> Prepared | None:
    """Return the launch that decodes ``packed``, with streams of any strides, into ``out`` ``[batch, kv_head, token, dim]`` with dense
    channels.

    ``rotated``: into the original frame, else in the coded one. In float32 the values are those of ``Group.decode_frame``, bit for bit;
    narrower ones may differ from them, rounded, where they are about halfway between two. Raises InvalidParameter if a stream is not as
    ``codec.layout`` says.
    """
    rows.check(codec, packed, *out.shape[:2])
    names = list(codec.row_layouts)
    channels = rows.channels_of(codec.dim, rotated)
    along_tokens = codec.axis == "token"
    tile = rows.tile_tokens(channels, rotated)
    if along_tokens and not rotated:
        # A tile then is within one group of tokens and loads one row of scales.
        tile = min(tile, codec.size)
    per_row = [rows.ONE_ROW if name == "scale_range" else codec.size if name == "scales" and along_tokens else 1 for name in names]
    scales = [_as_pairs(part.streams["scales"]) for part in packed]
    streams = [
        ([pairs if name == "scales" else part.streams[name] for name in names], part.tokens, part.first)
        for part, pairs in zip(packed, scales, strict=True)
    ]
    in_place = all(pairs.data_ptr() == part.streams["scales"].data_ptr() for part, pairs in zip(packed, scales, strict=True))
    batch, heads = out.shape[:2]
    # Blocks begin at a group of tokens.
    work = rows.work_of(streams, per_row, batch * heads, max(tile, codec.token_group), out.device, pages)
    matrix = signs_of(codec.rotation, channels, out.device) if rotated else work.table
    return rows.prepared(
        _decode, work, out, matrix,
        CODE=code_streams(codec)[0], SCALES=names.index("scales"), RANGE=names.index("scale_range") if "scale_range" in names else -1,
        TOKEN_SCALE=len(names) - 1 if "token_scale" in names else -1,
        SIZE=codec.size, MEMBERS=min(codec.size, channels), ALONG_TOKENS=along_tokens, BITS=codec.bits,
        ROTATED=rotated, DIM=codec.dim, TILE=tile, CHANNELS=channels, lasting=in_place,
    )  # fmt: skip


def _as_pairs(scales: torch.Tensor) -> torch.Tensor:
    """``[..., 2]`` of scale and center as integers ``[..., 1]``, so that one load reads both; copied only if not aligned for it."""
    *strides, last = scales.stride()
    if last != 1 or any(step % 2 for step in (scales.storage_offset(), *strides)):
        scales = scales.clone(memory_format=torch.contiguous_format)
    return scales.view(torch.int32 if scales.dtype == torch.float16 else torch.int16)


@triton.jit
def _half(bits: tl.tensor) -> tl.tensor:
    """The low 16 bits as a binary16, widened to float32."""
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _square(code: tl.tensor, range_row: tl.tensor, AT: tl.constexpr) -> tl.tensor:
    """The binary16 number that a code of 8 bits stands for, widened to float32; its step is element ``AT`` of the range."""
    root = as_float32(tl.load(range_row + (AT + 1))) + as_float32(tl.load(range_row + AT)) * (code & 0xFF).to(tl.float32)
    return (root * tl.abs(root)).to(tl.float16).to(tl.float32)


@triton.jit
def _scaled(code: tl.tensor, pair: tl.tensor, streams: tl.tuple, RANGE: tl.constexpr) -> tl.tensor:
    """Codes, counted from the middle, times scales and plus centers."""
    if RANGE >= 0:
        value = code * _square(pair, streams[RANGE], 0) + _square(pair >> 8, streams[RANGE], 2)
    else:
        value = code * _half(pair) + _half(pair >> 16)
    return value


@triton.jit(do_not_specialize=["blocks", "heads", "block_tokens"])
def _decode(
    out: tl.tensor,
    table: tl.tensor,
    status: tl.tensor,
    matrix: tl.tensor,
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
    SCALES: tl.constexpr,
    RANGE: tl.constexpr,
    TOKEN_SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    MEMBERS: tl.constexpr,
    ALONG_TOKENS: tl.constexpr,
    BITS: tl.constexpr,
    ROTATED: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Decode the block of one program, tile by tile: ``[token, channel]`` of codes, and scales that are broadcast to it."""
    block = load_block(out, table, status, batch_stride, head_stride, token_stride, blocks, heads, STREAMS, INTEGERS, PAGED, OUT_ALIGNED)
    if ROTATED:
        signs = load_signs(matrix, CHANNELS)
    token = tl.arange(0, TILE)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    for begin in range(0, block_tokens, TILE):
        count = block.count - begin
        streams = rows_from(block.streams, begin, STREAMS)
        mask = (token < count) & (channel < DIM)
        code = load_digit(streams, token, channel, mask, CODE, 0).to(tl.float32) - ((1 << BITS) - 1) / 2
        scales = streams[SCALES]
        if ALONG_TOKENS and TILE <= SIZE:
            pair = tl.load(scales + channel, channel < tl.where(count > 0, DIM, 0), 0)
            value = _scaled(code, pair, streams, RANGE)
        elif ALONG_TOKENS:
            pair = tl.load(scales + (token // SIZE * DIM + channel), mask, 0)
            value = _scaled(code, pair, streams, RANGE)
        else:
            GROUPS: tl.constexpr = (DIM + SIZE - 1) // SIZE
            PARTS: tl.constexpr = CHANNELS // MEMBERS
            group = tl.arange(0, PARTS)[None, :]
            pair = tl.load(scales + (token * GROUPS + group), (token < count) & (group < GROUPS), 0)[:, :, None]
            grouped = tl.reshape(code, (TILE, PARTS, MEMBERS))
            value = tl.reshape(_scaled(grouped, pair, streams, RANGE), (TILE, CHANNELS))
        if TOKEN_SCALE >= 0:
            value = value * load_per_token(streams[TOKEN_SCALE], count, TILE, 1, 0)
        if ROTATED:
            value = original(value, signs, DIM)
        store_tile(block.out + begin * token_stride, token_stride, token, channel, count, value, DIM)
