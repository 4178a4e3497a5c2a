"""The kernel that decodes packed rows in one pass, with a ``TileDecoder`` per codec.

The kernel finds the rows of each program, decodes them tile by tile, applies the inverse rotation if requested, and stores the values.
Float32 values equal those of ``formats/``.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton import language as tl

from kvpack.formats.base import Codec
from kvpack.kernels.triton_internals import code_key

from . import rows
from .output import load_signs, rotate_back, rotation_signs, store_tile
from .rows import EnginePages, PackedPart, PreparedDecode, advance_rows, load_block


class TileDecoder(NamedTuple):
    """A codec's Triton function ``decode``, which the kernel is compiled for, and the function's compile-time ``constants``.

    ``decode(tile, constants, shape)`` must return the values of a ``RowTile``, float32 ``[token, channel]``; ``shape`` is a ``TileShape``.
    """

    decode: Any
    constants: tuple[Any, ...]

    @property
    def cache_key(self) -> str:
        """Key of this constant in Triton's cache of compiled code."""
        return code_key(self)


class TileShape(NamedTuple):
    """Shape of a tile: ``tokens`` tokens and ``channels`` channels, both powers of two. Only the first ``dim`` channels have values."""

    dim: int
    tokens: int
    channels: int


class RowTile(NamedTuple):
    """The tokens of a tile, and the pointers and strides with which a ``TileDecoder`` loads them.

    ``streams`` are pointers to token 0's row in each stream, and ``count`` is the number of tokens in the block. ``token`` is ``[token,
    1]``, and ``channel`` is ``[1, channel]``. ``table`` and ``norm_table`` are the codec's lookup tables, if any.
    """

    streams: Any
    count: Any
    token: Any
    channel: Any
    table: Any
    norm_table: Any


def prepare_rows(
    codec: Codec,
    packed: Sequence[PackedPart],
    out: torch.Tensor,
    rotated: bool,
    pages: EnginePages | None,
    decoder: TileDecoder,
    *tables: torch.Tensor,
    min_channels: int = 1,
    max_tokens: int | None = None,
    view_stream: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, stream: stream,
    threads: int = 1,
) -> PreparedDecode:
    """Prepare the launch that decodes ``packed`` with ``decoder``. Streams may have arbitrary strides.

    ``out``, ``rotated`` and ``pages`` are as in ``decode.prepare``. There may be up to two lookup ``tables``. Tiles have at least
    ``min_channels`` channels and at most ``max_tokens`` tokens. ``view_stream(name, stream)`` must return each stream in the form that the
    decoder reads. Raises InvalidParameter if a stream does not match ``codec.layout``.
    """
    batch, heads = out.shape[:2]
    rows.check_layout(codec, packed, batch, heads)
    layouts = codec.row_layouts
    channels = max(min_channels, rows.channels_per_tile(codec.dim, rotated))
    tile = min(rows.tokens_per_tile(channels, rotated), max_tokens or rows.TILE_VALUES)
    per_row = [layout.tokens_per_row if layout.per == "token" else rows.ONE_ROW for layout in layouts.values()]
    streams = [([view_stream(name, part.streams[name]) for name in layouts], part.tokens, part.first) for part in packed]
    # Blocks begin at the start of a token group.
    work = rows.build_work(streams, per_row, batch * heads, max(tile, codec.group_tokens), out.device, pages)
    stored = (part.streams[name] for part in packed for name in layouts)
    read = (stream for part, _, _ in streams for stream in part)
    matrix = rotation_signs(codec.rotation, channels, out.device) if rotated else work.table
    return rows.prepare_launch(
        _decode, work, out, matrix, *tables, *[work.table] * (2 - len(tables)),
        DECODER=decoder, ROTATED=rotated, SHAPE=TileShape(codec.dim, tile, channels), threads=threads,
        cacheable=all(tensor.data_ptr() == source.data_ptr() for tensor, source in zip(stored, read, strict=True)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["blocks", "heads", "block_tokens"])
def _decode(
    out: tl.tensor,
    work: tl.tensor,
    status: tl.tensor,
    matrix: tl.tensor,
    table: tl.tensor,
    norm_table: tl.tensor,
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
    DECODER: tl.constexpr,
    ROTATED: tl.constexpr,
    SHAPE: tl.constexpr,
) -> None:
    CONSTANTS: tl.constexpr = DECODER.constants
    DIM: tl.constexpr = SHAPE.dim
    TOKENS: tl.constexpr = SHAPE.tokens
    CHANNELS: tl.constexpr = SHAPE.channels
    block = load_block(out, work, status, batch_stride, head_stride, token_stride, blocks, heads, STREAMS, INTEGERS, PAGED, OUT_ALIGNED)
    if ROTATED:
        signs = load_signs(matrix, CHANNELS)
    token = tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, CHANNELS)[None, :]
    for begin in range(0, block_tokens, TOKENS):
        count = block.count - begin
        tile = RowTile(advance_rows(block.streams, begin, STREAMS), count, token, channel, table, norm_table)
        value = DECODER.decode(tile, CONSTANTS, SHAPE)
        if ROTATED:
            value = rotate_back(value, signs, DIM)
        store_tile(block.out + begin * token_stride, token_stride, token, channel, count, value, DIM)
