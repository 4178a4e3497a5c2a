"""Decoding of packed rows with attention's tile loaders, to 16-bit values in the coded frame and the loaders' column order.

Attention with many queries uses it. The values in its scratch buffer need neither channel order nor the original frame, because queries and
sums of values are rotated instead. Values are as accurate as float16 tiles, rounded to the output dtype.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy
import torch
import triton
from triton import language as tl

from kvpack.formats.base import Codec
from kvpack.formats.raw import Raw
from kvpack.kernels.bitpack.bitfields import load_column_fields
from kvpack.kernels.loaders.tiles import Tiles
from kvpack.kernels.tables import shared_table
from kvpack.kernels.tiles import addresses, device_tables, loaders
from kvpack.kernels.tiles.bound_loader import LoadMode, RowStream, bind
from kvpack.kernels.tiles.shapes import table_budget
from kvpack.kernels.tiles.table_setup import begin_tables, fill_tables
from kvpack.kernels.tiles.work import STREAM_INTEGERS, PackedRows, load_tiles, stream_pointers
from kvpack.kernels.triton_internals import CachedLaunch

from .rows import PackedPart, check_layout

WARPS = 4
"""Number of warps per program. On an H200, one to eight warps, and loads one to three tiles ahead, are equally fast."""

TOKENS = 32
"""Minimum number of tokens in a warp's tile; loaders with one row per thread need more."""

PROGRAMS = 1 << 10
"""Number of programs that fill a device. Programs get more than one tile only if there are more tiles than this."""

MAX_TILES = 4
"""Maximum number of tiles per warp."""

FIRST_ADDRESS = tl.constexpr(3)
"""Integers per table row before the addresses: a page's first block, its number of tokens, and its first output token."""


class PageTable(NamedTuple):
    """Work table of a launch, int64 ``[page, FIRST_ADDRESS + STREAM_INTEGERS * streams]`` on the device.

    The pages have ``blocks`` blocks of ``block_tokens`` tokens in total. ``firsts`` contains the first block and the first output token of
    each page, and ``end`` is the token after the last page. ``keep_alive`` contains the tensors to which the table points, and ``copied``
    is True if some of them are copies of streams. ``rows`` is a copy of ``table`` on the host.
    """

    table: torch.Tensor
    blocks: int
    block_tokens: int
    firsts: tuple[tuple[int, int], ...]
    end: int
    streams: tuple[RowStream, ...]
    keep_alive: tuple[torch.Tensor, ...]
    copied: bool
    rows: numpy.ndarray[Any, numpy.dtype[numpy.int64]]

    def first_token(self, block: int) -> int:
        """Return the first output token of ``block``. The index after the last block stands for ``end``."""
        if block == self.blocks:
            return self.end
        first, token = self.firsts[bisect_right(self.firsts, block, key=lambda page: page[0]) - 1]
        return token + (block - first) * self.block_tokens

    def parts(self, tokens: int) -> Iterator[tuple[range, int, int]]:
        """Split the blocks into ranges of about ``tokens`` tokens. Yields (blocks, first token, end token) for each range."""
        blocks_per_part = max(1, tokens // self.block_tokens)
        for first in range(0, self.blocks, blocks_per_part):
            blocks = range(first, min(first + blocks_per_part, self.blocks))
            yield blocks, self.first_token(blocks.start), self.first_token(blocks.stop)


@lru_cache(maxsize=256)
def find_loader(codec: Codec) -> Tiles | None:
    """Return the tile loader for ``codec``, or None if ``decode`` does not support it.

    The raw codec, codecs without a loader, and sidecars that add to tiles are not supported.
    """
    tiles = loaders.find_tiles(codec)
    if tiles is None or type(codec) is Raw or tiles.signs or tiles.means or tiles.outliers or tiles.dtype != "fp16":
        return None
    return tiles


def build_work(codec: Codec, packed: Sequence[PackedPart], batch: int, heads: int, device: torch.device, warps: int = WARPS) -> PageTable:
    """Build the work table for decoding ``packed``, which are consecutive pages of a codec with a loader.

    A program has ``warps`` warps. Raises InvalidParameter unless all streams have the codec's layout.
    """
    tiles = find_loader(codec)
    assert tiles is not None
    check_layout(codec, packed, batch, heads)
    span_tokens = warps * tokens_per_tile(tiles)
    spans = sum(-(-part.tokens // span_tokens) for part in packed) * batch * heads
    block = span_tokens * max(1, min(MAX_TILES, spans // PROGRAMS))
    keep_alive: list[torch.Tensor] = []
    result, blocks = [], 0
    for part in packed:
        result.append([blocks, part.tokens, part.first, *addresses.stream_addresses(part.streams, tiles.streams, keep_alive)])
        blocks += -(-part.tokens // block)
    rows = numpy.array(result, dtype=numpy.int64)
    table = torch.from_numpy(rows).to(device, non_blocking=True)
    firsts = tuple((row[0], row[2]) for row in result)
    end = packed[-1].first + packed[-1].tokens
    sources = [part.streams[stream.name] for part in packed for stream in tiles.streams]
    copied = any(tensor is not source for tensor, source in zip(keep_alive, sources, strict=True))
    streams = addresses.describe_streams(rows, tiles.streams, FIRST_ADDRESS.value)
    return PageTable(table, blocks, block, firsts, end, streams, tuple(keep_alive), copied, rows)


def decode(codec: Codec, work: PageTable, out: torch.Tensor, blocks: range | None = None, factors: torch.Tensor | None = None) -> None:
    """Decode ``work``, or only some ``blocks`` of it, into 16-bit ``out`` ``[batch, kv_head, token, column]`` with contiguous columns.

    Columns are in the order of ``frame_columns.columns``. Token 0 of ``out`` is the first token of the first block. If ``factors`` is
    given, float32 ``[batch, kv_head, token]`` with contiguous sequences, token factors are stored there instead of being multiplied into
    values.
    """
    factor_stride = None if factors is None else factors.stride(1)
    prepare(codec, work, out.shape, out.stride(), out.dtype, blocks, factor_stride)(out, 0, factors)


class TileDecodeLaunch(NamedTuple):
    """A prepared launch that decodes ``work``. ``launch`` is None if there are no tokens."""

    launch: CachedLaunch | None
    work: PageTable
    iota: torch.Tensor
    table: torch.Tensor

    def __call__(
        self, out: torch.Tensor, first: int, factors: torch.Tensor | None = None, table: tuple[torch.Tensor, int] | None = None
    ) -> None:
        """Decode into ``out``, beginning at element ``first``.

        Unless it is None, ``table`` replaces the work table: a tensor, and the index of the table's first element.
        """
        if self.launch is not None:
            work = (self.work.table, 0) if table is None else table
            self.launch((out, first), work if factors is None else (factors, 0), work, (self.iota, 0), (self.table, 0))


def prepare(
    codec: Codec,
    work: PageTable,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    blocks: range | None = None,
    factor_stride: int | None = None,
) -> TileDecodeLaunch:
    """Prepare the launch of ``decode`` for an output of ``shape`` and ``strides``.

    With ``factor_stride``, calls must pass ``factors``, in which sequences are ``factor_stride`` values apart.
    """
    batch, heads = shape[:2]
    blocks = range(work.blocks) if blocks is None else blocks
    pages, device = work.table.shape[0], str(work.table.device)
    launch, table = _launch(
        codec,
        work.streams,
        (*strides[:3], pages, blocks.start, len(blocks), work.first_token(blocks.start), heads, work.block_tokens, factor_stride or 0),
        batch,
        dtype,
        factor_stride is not None,
        device,
        addresses.uses_inline_ptx(work.table.device),
    )
    return TileDecodeLaunch(launch if len(blocks) * batch * heads else None, work, device_tables.counting_tensor(device), table)


def tokens_per_tile(tiles: Tiles) -> int:
    return max(TOKENS, tiles.tokens)


@lru_cache(maxsize=1024)
def _launch(
    codec: Codec,
    streams: tuple[RowStream, ...],
    arguments: tuple[int, ...],
    batch: int,
    dtype: torch.dtype,
    factors: bool,
    device: str,
    fast: bool,
) -> tuple[CachedLaunch, torch.Tensor]:
    """Return the compiled launch for outputs of ``dtype``, shared by all layers of a model, and the loader's lookup table."""
    tiles = find_loader(codec)
    assert tiles is not None
    tokens = tokens_per_tile(tiles)
    blocks, heads = arguments[5], arguments[7]
    shared, tables, table_offsets = device_tables.load_tables(tiles, tiles, torch.device(device), fast, table_budget(tiles, tiles))
    # Blocks begin at whole tiles, and pages at the start of a token group.
    whole_tiles = tiles.whole_groups % tokens == 0
    launch = CachedLaunch(
        decode_tiles,
        (blocks * batch * heads, 1, 1),
        arguments,
        {
            "SIDE": bind(tiles, LoadMode(table_offsets[0], False, fast), None, streams, whole_tiles), "TABLES": shared, "WARPS": WARPS,
            "TOKENS": tokens, "WORK_ROW": FIRST_ADDRESS.value + STREAM_INTEGERS.value * len(streams), "FACTORS": factors, "FAST": fast,
        },
        {"num_warps": WARPS},
        partial(shared_table.allow_tables, table_bytes=shared.nbytes) if shared.nbytes else None,
    )  # fmt: skip
    return launch, tables[0]


@triton.jit(do_not_specialize=["pages", "first_block", "blocks", "first_token", "heads", "block_tokens", "factor_stride"])
def decode_tiles(
    out: tl.tensor,
    factors: tl.tensor,
    work_table: tl.tensor,
    iota: tl.tensor,
    table: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    pages: tl.tensor,
    first_block: tl.tensor,
    blocks: tl.tensor,
    first_token: tl.tensor,
    heads: tl.tensor,
    block_tokens: tl.tensor,
    factor_stride: tl.tensor,
    SIDE: tl.constexpr,
    TABLES: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORK_ROW: tl.constexpr,
    FACTORS: tl.constexpr,
    FAST: tl.constexpr,
) -> None:
    """Decode one block of ``block_tokens`` tokens of one page, sequence and head.

    The launch covers ``blocks`` blocks, beginning with block ``first_block``, whose first token ``first_token`` is token 0 of the output.
    With ``FACTORS``, token factors are stored in ``factors``, float32 ``[sequence, token]``, instead of being multiplied into values.
    """
    MODE: tl.constexpr = SIDE.mode
    FIELDS: tl.constexpr = SIDE.stream_widths
    STEPS: tl.constexpr = SIDE.steps
    CONSTANTS: tl.constexpr = SIDE.constants
    SPAN: tl.constexpr = WARPS * TOKENS
    sequence = tl.program_id(0) // blocks
    table += sequence % SIDE.tables * SIDE.table_values
    entries = begin_tables(table, table, TABLES, WARPS)
    block = load_page_block(work_table, first_block + tl.program_id(0) % blocks, pages, sequence, heads, block_tokens, SIDE, WORK_ROW)
    begin, count, streams = block.begin, block.count, block.streams
    output_token = block.first_output - first_token
    target = out + block.batch * batch_stride + block.head * head_stride + output_token * token_stride
    if SIDE.load_columns is None:
        fields = load_column_fields(iota, FIELDS)
    else:
        fields = SIDE.load_columns(table, PackedRows(streams, begin * 0), CONSTANTS, TOKENS)
    fill_tables(entries, TABLES)
    if TABLES.nbytes:
        tl.debug_barrier()
    token = tl.arange(0, WARPS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]  # [warp, token]
    for offset in tl.range(0, count, SPAN, num_stages=1):
        first = (begin + offset).to(tl.int64)
        loaded = load_tiles(streams, first, token, count - offset, SIDE, 1, TOKENS, True)
        factor = token
        if SIDE.factor is not None:
            factor = SIDE.factor(loaded[0][0], CONSTANTS, FAST)
            if FACTORS:
                tl.store(factors + sequence.to(tl.int64) * factor_stride + output_token + offset + token, factor, token < count - offset)
        rows = target + (offset + token) * token_stride
        for step in tl.static_range(STEPS):
            tiles = SIDE.decode(loaded[0][0], fields, table, step, CONSTANTS, MODE)
            for index in tl.static_range(len(tiles)):
                _store_tile(tiles[index], factor, streams, rows, token < count - offset, step * len(tiles) + index, SIDE, FACTORS)


class PageBlock(NamedTuple):
    """``count`` tokens of one page, sequence and head, beginning at token ``begin`` of ``page``.

    ``first_output`` is the first output token of the block, and ``streams`` are pointers to the page's streams.
    """

    page: Any
    batch: Any
    head: Any
    begin: Any
    count: Any
    first_output: Any
    streams: Any


@triton.jit
def load_page_block(
    work_table: tl.tensor,
    block: tl.tensor,
    pages: tl.tensor,
    sequence: tl.tensor,
    heads: tl.tensor,
    block_tokens: tl.tensor,
    SIDE: tl.constexpr,
    WORK_ROW: tl.constexpr,
) -> tl.tuple:
    """Load the ``PageBlock`` with index ``block`` of ``sequence``."""
    batch = (sequence // heads).to(tl.int64)
    head = (sequence % heads).to(tl.int64)
    page = _find_page(block, work_table, pages, WORK_ROW)
    row = work_table + page * WORK_ROW
    begin = (block - tl.load(row).to(tl.int32)) * block_tokens
    count = tl.minimum(tl.load(row + 1).to(tl.int32) - begin, block_tokens)
    return PageBlock(page, batch, head, begin, count, tl.load(row + 2) + begin, stream_pointers(row + FIRST_ADDRESS, batch, head, SIDE))


@triton.jit
def _find_page(block: tl.tensor, work_table: tl.tensor, pages: tl.tensor, WORK_ROW: tl.constexpr) -> tl.tensor:
    """Find the page that contains ``block``, by binary search. Returns the page's index."""
    page = block * 0
    end = page + pages
    while end - page > 1:
        middle = (page + end) // 2
        is_later = tl.load(work_table + middle * WORK_ROW) > block
        page = tl.where(is_later, page, middle)
        end = tl.where(is_later, middle, end)
    return page


@triton.jit
def _store_tile(
    value: tl.tensor,
    factor: tl.tensor,
    streams: tl.tuple,
    rows: tl.tensor,
    valid: tl.tensor,
    COLUMN_TILE: tl.constexpr,
    SIDE: tl.constexpr,
    FACTORS: tl.constexpr,
) -> None:
    """Store tile ``COLUMN_TILE`` of the tokens' columns, ``[warp, token, column]``.

    If all tokens of a run share a factor, the tile is multiplied by it. Otherwise, it is multiplied by ``factor`` ``[warp, token]``, except
    with ``FACTORS``, which stores factors separately.
    """
    WIDTH: tl.constexpr = SIDE.widths[COLUMN_TILE]
    CONSTANTS: tl.constexpr = SIDE.constants
    if SIDE.run_product is not None:
        value = SIDE.run_product(value.to(tl.float32), streams, CONSTANTS)
    elif SIDE.factor is not None and not FACTORS:
        value = value.to(tl.float32) * factor[:, :, None]
    address = rows[:, :, None] + (COLUMN_TILE * WIDTH + tl.arange(0, WIDTH)[None, None, :])
    tl.store(address, value.to(rows.dtype.element_ty), valid[:, :, None])
