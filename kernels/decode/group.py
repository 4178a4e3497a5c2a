"""Decoder of the group codec for ``kernel`` (spec/codecs/group.md)."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.group import Group

from .digits import CodeStream, code_streams, load_digit
from .kernel import TileDecoder, prepare_rows
from .rows import EnginePages, PackedPart, PreparedDecode, as_float32, load_per_token


class GroupConstants(NamedTuple):
    """Compile-time constants of a group codec.

    A group is ``size`` tokens (``along_tokens``) or ``size`` channels, and a code has ``bits`` bits. ``scales``, ``ranged`` and
    ``token_scale`` are stream indices; -1 means that there is no such stream.
    """

    code: CodeStream
    bits: int
    size: int
    along_tokens: bool
    scales: int
    ranged: int
    token_scale: int


def prepare(
    codec: Group, packed: Sequence[PackedPart], out: torch.Tensor, rotated: bool, pages: EnginePages | None = None
) -> PreparedDecode | None:
    """Prepare the launch that decodes the group codec, as ``decode.prepare`` does.

    Float32 values equal the result of ``Group.decode_frame`` bit for bit. In narrower dtypes, near-ties may be rounded differently.
    """
    names = list(codec.row_layouts)
    along_tokens = codec.axis == "token"
    constants = GroupConstants(
        code_streams(codec)[0], codec.bits, codec.size, along_tokens,
        *(names.index(name) if name in names else -1 for name in ("scales", "scale_range", "token_scale")),
    )  # fmt: skip
    return prepare_rows(
        codec, packed, out, rotated, pages, TileDecoder(_decode_group, constants),
        # A tile is then within one group of tokens and loads one row of scales.
        max_tokens=codec.size if along_tokens and not rotated else None,
        view_stream=lambda name, stream: _view_pairs(stream) if name == "scales" else stream,
    )  # fmt: skip


def _view_pairs(scales: torch.Tensor) -> torch.Tensor:
    """View pairs of scale and center ``[..., 2]`` as integers ``[..., 1]``, so that one load reads both. Unaligned scales are copied."""
    *strides, last = scales.stride()
    if last != 1 or any(step % 2 for step in (scales.storage_offset(), *strides)):
        scales = scales.clone(memory_format=torch.contiguous_format)
    return scales.view(torch.int32 if scales.dtype == torch.float16 else torch.int16)


@triton.jit
def _half_as_float32(bits: tl.tensor) -> tl.tensor:
    return (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _dequantize_scale(code: tl.tensor, range_row: tl.tensor, AT: tl.constexpr) -> tl.tensor:
    """Return the scale or center that an 8-bit code stands for, rounded to float16, as float32.

    Element ``AT`` of the range is the step, and the next element is the minimum.
    """
    root = as_float32(tl.load(range_row + (AT + 1))) + as_float32(tl.load(range_row + AT)) * (code & 0xFF).to(tl.float32)
    return (root * tl.abs(root)).to(tl.float16).to(tl.float32)


@triton.jit
def _apply_scales(code: tl.tensor, pair: tl.tensor, streams: tl.tuple, RANGE: tl.constexpr) -> tl.tensor:
    """Return ``code * scale + center``.

    ``pair`` contains the scale and the center or, if ``RANGE`` is not negative, the 8-bit codes of both.
    """
    if RANGE >= 0:
        value = code * _dequantize_scale(pair, streams[RANGE], 0) + _dequantize_scale(pair >> 8, streams[RANGE], 2)
    else:
        value = code * _half_as_float32(pair) + _half_as_float32(pair >> 16)
    return value


@triton.jit
def _decode_group(tile: tl.tuple, CONSTANTS: tl.constexpr, SHAPE: tl.constexpr) -> tl.tensor:
    """Decode a ``RowTile`` of the group codec to float32 ``[token, channel]``."""
    CODE: tl.constexpr = CONSTANTS.code
    SIZE: tl.constexpr = CONSTANTS.size
    RANGE: tl.constexpr = CONSTANTS.ranged
    MIDDLE: tl.constexpr = ((1 << CONSTANTS.bits) - 1) / 2
    DIM: tl.constexpr = SHAPE.dim
    TOKENS: tl.constexpr = SHAPE.tokens
    CHANNELS: tl.constexpr = SHAPE.channels
    mask = (tile.token < tile.count) & (tile.channel < DIM)
    code = load_digit(tile.streams, tile.token, tile.channel, mask, CODE, 0).to(tl.float32) - MIDDLE
    scales = tile.streams[CONSTANTS.scales]
    if CONSTANTS.along_tokens and TOKENS <= SIZE:
        pair = tl.load(scales + tile.channel, tile.channel < tl.where(tile.count > 0, DIM, 0), 0)
        value = _apply_scales(code, pair, tile.streams, RANGE)
    elif CONSTANTS.along_tokens:
        pair = tl.load(scales + (tile.token // SIZE * DIM + tile.channel), mask, 0)
        value = _apply_scales(code, pair, tile.streams, RANGE)
    else:
        GROUPS: tl.constexpr = (DIM + SIZE - 1) // SIZE
        MEMBERS: tl.constexpr = SIZE if SIZE < CHANNELS else CHANNELS
        PARTS: tl.constexpr = CHANNELS // MEMBERS
        group = tl.arange(0, PARTS)[None, :]
        pair = tl.load(scales + (tile.token * GROUPS + group), (tile.token < tile.count) & (group < GROUPS), 0)[:, :, None]
        grouped = tl.reshape(code, (TOKENS, PARTS, MEMBERS))
        value = tl.reshape(_apply_scales(grouped, pair, tile.streams, RANGE), (TOKENS, CHANNELS))
    if CONSTANTS.token_scale >= 0:
        value = value * load_per_token(tile.streams[CONSTANTS.token_scale], tile.count, TOKENS, 1, 0)
    return value
