"""Attention over pages with a mean key (sidecar key_mean): each query row is multiplied by a page's mean once for all its tokens."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy
import torch
import triton
from triton import language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvpack.formats.columns import next_power_of_two
from kvpack.formats.key_mean import CODES, SCALE, KeyMean
from kvpack.kernels.bitpack.streams import Stream
from kvpack.kernels.tiles import addresses, frame_columns
from kvpack.kernels.triton_internals import CachedLaunch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpack.formats.base import Codec

    from .segments import SideSegment

PAGES = 32
"""Number of pages per program."""

_TABLE_ROW = tl.constexpr(7)


class Means(NamedTuple):
    """The page means of one launch's keys; pages are numbered from 0, and each segment begins at a multiple of ``PAGES``.

    ``pages`` counts pages, including padding. Each row of ``table``, int64 ``[block, 7]``, describes ``PAGES`` pages: how many exist, then
    the address, batch stride and head stride, in bytes, of their codes and of their scales.
    """

    key_mean: KeyMean
    table: torch.Tensor
    pages: int

    def padded(self, blocks: int) -> Means:
        """Return a copy padded to ``blocks`` blocks; the added blocks have no pages."""
        rows = torch.nn.functional.pad(self.table, (0, 0, 0, blocks - self.table.shape[0]))
        return self._replace(table=rows, pages=blocks * PAGES)


def collect_means(segments: Sequence[SideSegment], keep_alive: list[torch.Tensor]) -> tuple[Means, list[int]]:
    """Return the ``Means`` of key segments, and the position of each segment's first token, counted from the start of page 0.

    A segment may occur several times. Tensors whose addresses are used are appended to ``keep_alive``.
    """
    key_mean = segments[0].codec.sidecar(KeyMean)
    assert key_mean is not None
    streams = Stream(CODES, 8, key_mean.dim * key_mean.bits // 8, key_mean.tokens), Stream(SCALE, 16, 1, key_mean.tokens)
    rows: list[list[int]] = []
    first_tokens: dict[int, int] = {}
    pages = 0
    for segment in {id(part): part for part in segments}.values():
        # A segment may begin anywhere in a page, and begins a new block.
        offset = segment.start % key_mean.tokens
        first_tokens[id(segment)] = pages * key_mean.tokens + offset
        codes, codes_batch, codes_head, scales, *scales_strides = addresses.stream_addresses(segment.streams, streams, keep_alive)
        count = -(-(offset + segment.tokens) // key_mean.tokens)
        for first in range(0, count, PAGES):
            code_entries = codes + first * streams[0].row, codes_batch, codes_head
            rows.append([min(PAGES, count - first), *code_entries, scales + 2 * first, *scales_strides])
        pages += -(-count // PAGES) * PAGES
    return Means(key_mean, torch.from_numpy(numpy.array(rows, numpy.int64)), pages), [first_tokens[id(part)] for part in segments]


def prepare_launch(
    means: Means, codec: Codec, dual: bool, heads: int, sequences: int, padded: int, block: int, dependent: bool, early: bool
) -> tuple[CachedLaunch, torch.Tensor]:
    """Return the launch that multiplies query rows by page means, and its input tensor ``columns``.

    There are ``sequences`` sequences of ``padded`` query rows, processed in blocks of ``block`` rows.
    """
    columns, count = _channel_columns(codec, dual, str(means.table.device))
    key_mean = means.key_mean
    launch = CachedLaunch(
        page_products,
        (means.table.shape[0], sequences, padded // block),
        (heads, padded, means.pages),
        {
            "DIM": key_mean.dim, "BITS": key_mean.bits, "BLOCK_DIM": max(16, next_power_of_two(key_mean.dim * key_mean.bits // 8)),
            "COLUMNS": count, "PAGES": PAGES, "ROWS": block, "DEPENDENT": dependent, "EARLY": early,
        },
        {"launch_pdl": True} if dependent else {},
    )  # fmt: skip
    return launch, columns


@lru_cache(maxsize=256)
def _channel_columns(codec: Codec, dual: bool, device: str) -> tuple[torch.Tensor, int]:
    """Return the column of each channel in the tiles of ``codec``'s loader, int32, and the total number of columns."""
    channels = frame_columns.columns(codec, dual)
    columns = {channel: column for column, channel in enumerate(channels) if channel >= 0}
    return torch.tensor([columns[channel] for channel in range(codec.dim)], dtype=torch.int32, device=device), len(channels)


@triton.jit(do_not_specialize=["heads", "padded", "pages"])
def page_products(
    products: tl.tensor,
    rotated: tl.tensor,
    table: tl.tensor,
    columns: tl.tensor,
    heads: tl.tensor,
    padded: tl.tensor,
    pages: tl.tensor,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Write the products of ``ROWS`` query rows with the page means in one row of ``table``, float32 ``[sequence, page, row]``.

    ``rotated`` is the output of ``rotation.rotate_queries``; ``columns`` contains the column of each channel.
    """
    BYTES: tl.constexpr = DIM * BITS // 8
    entry = table + tl.program_id(0) * _TABLE_ROW
    sequence = tl.program_id(1)
    batch = (sequence // heads).to(tl.int64)
    head = (sequence % heads).to(tl.int64)
    page = tl.arange(0, PAGES)
    valid = page < tl.load(entry)
    codes = (tl.load(entry + 1) + batch * tl.load(entry + 2) + head * tl.load(entry + 3)).to(tl.pointer_type(tl.int8))
    scales = (tl.load(entry + 4) + batch * tl.load(entry + 5) + head * tl.load(entry + 6)).to(tl.pointer_type(tl.float16))
    byte = tl.arange(0, BLOCK_DIM)
    code = tl.load(codes + page[:, None] * BYTES + byte[None, :], valid[:, None] & (byte < BYTES)[None, :], 0).to(tl.int32) & 0xFF
    scale = tl.load(scales + page, valid, 0.0).to(tl.float32)
    low_column = tl.load(columns + byte, byte < BYTES, 0)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    begin = rotated + sequence.to(tl.int64) * COLUMNS * padded + row
    if DEPENDENT:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    mask = (byte < BYTES)[:, None]
    query = tl.load(begin[None, :] + low_column[:, None] * padded, mask, 0.0)
    if BITS == 8:
        product = tl.dot((code - 128).to(tl.float32), query, input_precision="tf32x3")
    else:
        # A byte contains one channel of the first half and one of the second.
        high_column = tl.load(columns + BYTES + byte, byte < BYTES, 0)
        product = tl.dot(((code & 15) - 8).to(tl.float32), query, input_precision="tf32x3")
        query = tl.load(begin[None, :] + high_column[:, None] * padded, mask, 0.0)
        product = tl.dot(((code >> 4) - 8).to(tl.float32), query, product, input_precision="tf32x3")
    # Missing pages count as zeros.
    offset = (sequence.to(tl.int64) * pages + tl.program_id(0) * PAGES + page)[:, None] * padded + row[None, :]
    tl.store(products + offset, product * scale[:, None])
