"""The kernel that decodes packed rows in one pass: it locates the rows of a program, rotates values back, and stores them.

A codec contributes its ``Decoder``, a Triton function that computes the values of a tile of rows. In float32 they equal those of
``formats/``.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import triton
from triton import language as tl

from kvpack.kernels.triton_internals import code_key

from . import rows
from .rows import load_block, rows_from
from .stored import load_signs, original, signs_of, store_tile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from kvpack.formats.base import Codec

    from .rows import Packed, Pages, Prepared


class Decoder(NamedTuple):
    """A codec's function, for which the kernel is compiled, and its ``constants``, a tuple of numbers.

    ``values(tile, constants, shape)`` returns the values of a ``RowTile``, float32 ``[token, channel]``; ``shape`` is a ``TileShape``.
    """

    values: Any
    constants: tuple[Any, ...]

    @property
    def cache_key(self) -> str:
        """Key by which Triton names compiled code."""
        return code_key(self)


class TileShape(NamedTuple):
    """Tiles of ``tokens`` tokens and ``channels`` channels, powers of two, of which ``dim`` channels are the codec's."""

    dim: int
    tokens: int
    channels: int


class RowTile(NamedTuple):
    """Tokens, of which the first ``count`` are in the block: pointers to the row of token 0 in each of the ``streams``, and the tables.

    ``token`` is ``[token, 1]``, and ``channel`` ``[1, channel]``.
    """

    streams: Any
    count: Any
    token: Any
    channel: Any
    table: Any
    norm_table: Any


def prepare_rows(
    codec: Codec,
    packed: Sequence[Packed],
    out: torch.Tensor,
    rotated: bool,
    pages: Pages | None,
    decoder: Decoder,
    *tables: torch.Tensor,
    least_channels: int = 1,
    most_tokens: int | None = None,
    as_read: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, stream: stream,
    threads: int = 1,
) -> Prepared:
    """Return the launch that decodes ``packed``, with streams of any strides, into ``out`` with contiguous channels.

    ``out`` is ``[batch, kv_head, token, dim]``. ``rotated``: into the original frame, otherwise in the coded one. Tiles have at least
    ``least_channels`` and at most ``most_tokens``. ``as_read(name, stream)`` returns each stream as the decoder reads it; it uses at most
    two ``tables``. Raises InvalidParameter if a stream does not match ``codec.layout``.
    """
    batch, heads = out.shape[:2]
    rows.check(codec, packed, batch, heads)
    layouts = codec.row_layouts
    channels = max(least_channels, rows.channels_of(codec.dim, rotated))
    tile = min(rows.tile_tokens(channels, rotated), most_tokens or rows.TILE_VALUES)
    per_row = [layout.tokens_per_row if layout.per == "token" else rows.ONE_ROW for layout in layouts.values()]
    streams = [([as_read(name, part.streams[name]) for name in layouts], part.tokens, part.first) for part in packed]
    # Blocks begin at a group of tokens.
    work = rows.work_of(streams, per_row, batch * heads, max(tile, codec.token_group), out.device, pages)
    given = (part.streams[name] for part in packed for name in layouts)
    read = (stream for part, _, _ in streams for stream in part)
    matrix = signs_of(codec.rotation, channels, out.device) if rotated else work.table
    return rows.prepared(
        _decode, work, out, matrix, *tables, *[work.table] * (2 - len(tables)),
        DECODER=decoder, ROTATED=rotated, SHAPE=TileShape(codec.dim, tile, channels), threads=threads,
        lasting=all(tensor.data_ptr() == source.data_ptr() for tensor, source in zip(given, read, strict=True)),
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
    """Decode the block of one program, tile by tile."""
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
        tile = RowTile(rows_from(block.streams, begin, STREAMS), count, token, channel, table, norm_table)
        value = DECODER.values(tile, CONSTANTS, SHAPE)
        if ROTATED:
            value = original(value, signs, DIM)
        store_tile(block.out + begin * token_stride, token_stride, token, channel, count, value, DIM)
