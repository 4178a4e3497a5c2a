"""Decode packed rows of polar to values in one pass (spec/codecs/polar.md); ``formats/polar.py`` is the oracle."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.bitpack.columns import constant_at
from kvpack.kernels.encode.polar import MAX_ANGLES, directions_of

from . import rows
from .digits import code_streams, load_digit
from .rows import as_float32, load_block, rows_from
from .stored import load_signs, original, signs_of, store_tile

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kvpack.formats.polar import Polar

    from .rows import Packed, Pages, Prepared


class LevelSymbols(NamedTuple):
    """The angles of one level: the number of their code stream, and the first of them in it."""

    stream: int
    first: int


def prepare(codec: Polar, packed: Sequence[Packed], out: torch.Tensor, rotated: bool, pages: Pages | None = None) -> Prepared | None:
    """Return the launch that decodes ``packed``, with streams of any strides, into ``out`` ``[batch, kv_head, token, dim]`` with dense
    channels.

    ``rotated``: into the original frame, else in the coded one. In float32 the values are those of ``Polar.decode_frame``, bit for bit.
    None for a level with an unequal pair, or with an odd number of radii. Raises InvalidParameter if a stream is not as ``codec.layout``
    says.
    """
    levels = _levels(codec)
    if levels is None:
        return None
    batch, heads = out.shape[:2]
    rows.check(codec, packed, batch, heads)
    names = list(codec.row_layouts)
    channels = max(2, rows.channels_of(codec.dim, rotated))
    tile = rows.tile_tokens(channels, rotated)
    streams = [([part.streams[name] for name in names], part.tokens, part.first) for part in packed]
    work = rows.work_of(streams, [1] * len(names), batch * heads, tile, out.device, pages)
    matrix = signs_of(codec.rotation, channels, out.device) if rotated else work.table
    return rows.prepared(
        _decode, work, out, matrix, directions_of(codec.levels[0].bits, codec.tables[1:], out.device),
        CODES=code_streams(codec), LEVELS=levels, RADII=codec.radii, RADIUS=len(names) - 1, MOST=MAX_ANGLES,
        ROTATED=rotated, DIM=codec.dim, TILE=tile, CHANNELS=channels,
    )  # fmt: skip


def _levels(codec: Polar) -> tuple[LevelSymbols, ...] | None:
    """None if a level does not pair all radii alike."""
    found, radii = [], codec.dim
    for number, run in enumerate(codec.stream_levels.values()):
        first = 0
        for level in run:
            if 2 * level.angles != radii or len(level.pairs) > 1:
                return None
            found.append(LevelSymbols(number, first))
            first, radii = first + level.angles, level.angles
    return tuple(found)


@triton.jit(do_not_specialize=["blocks", "heads", "block_tokens"])
def _decode(
    out: tl.tensor,
    table: tl.tensor,
    status: tl.tensor,
    matrix: tl.tensor,
    directions: tl.tensor,
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
    CODES: tl.constexpr,
    LEVELS: tl.constexpr,
    RADII: tl.constexpr,
    RADIUS: tl.constexpr,
    MOST: tl.constexpr,
    ROTATED: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    """Decode the block of one program, tile by tile. ``directions`` is ``[level, MOST, 2]``; a channel's products begin at its radius."""
    block = load_block(out, table, status, batch_stride, head_stride, token_stride, blocks, heads, STREAMS, INTEGERS, PAGED, OUT_ALIGNED)
    if ROTATED:
        signs = load_signs(matrix, CHANNELS)
    token = tl.arange(0, TILE)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    for begin in range(0, block_tokens, TILE):
        count = block.count - begin
        streams = rows_from(block.streams, begin, STREAMS)
        mask = (token < count) & (channel < DIM)
        value = as_float32(tl.load(streams[RADIUS] + (token * RADII + (channel >> len(LEVELS))), mask, 0))
        # From the radii down, as formats/ multiplies.
        for level in tl.static_range(len(LEVELS) - 1, -1, -1):
            symbol = constant_at(LEVELS, level, 1) + (channel >> (level + 1))
            code = load_digit(streams, token, symbol, mask, constant_at(CODES, constant_at(LEVELS, level, 0)), 0)
            value = value * tl.load(directions + ((level * MOST + code) * 2 + (channel >> level & 1)), mask, 0.0)
        if ROTATED:
            value = original(value, signs, DIM)
        store_tile(block.out + begin * token_stride, token_stride, token, channel, count, value, DIM)
