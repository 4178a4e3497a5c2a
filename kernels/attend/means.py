"""key_mean in attention: each query row is multiplied once with the mean of every page of keys, for all tokens of the page."""

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
"""Pages of one program."""

_TABLE_ROW = tl.constexpr(7)


class Means(NamedTuple):
    """Means of the keys of a launch, whose ``pages`` pages are numbered from 0; segments begin at multiples of ``PAGES``.

    ``table``, int64 ``[block, 7]``, describes ``PAGES`` pages per row: the number of pages present, and for their codes and their scales
    the address and the batch and head strides in bytes.
    """

    key_mean: KeyMean
    table: torch.Tensor
    pages: int

    def padded(self, blocks: int) -> Means:
        """Pad to ``blocks`` blocks; the added blocks have no pages."""
        rows = torch.nn.functional.pad(self.table, (0, 0, 0, blocks - self.table.shape[0]))
        return self._replace(table=rows, pages=blocks * PAGES)


def means_of(found: Sequence[SideSegment], held: list[torch.Tensor]) -> tuple[Means, list[int]]:
    """Return the ``Means`` of key segments with means, and for each segment the token, counted from page 0, at which its row 0 is.

    A segment may occur several times. Tensors whose addresses are used are appended to ``held``.
    """
    key_mean = found[0].codec.side_car(KeyMean)
    assert key_mean is not None
    streams = Stream(CODES, 8, key_mean.dim * key_mean.bits // 8, key_mean.tokens), Stream(SCALE, 16, 1, key_mean.tokens)
    rows: list[list[int]] = []
    places: dict[int, int] = {}
    pages = 0
    for segment in {id(part): part for part in found}.values():
        # Segments begin anywhere in a page of tokens, and each in a block of its own.
        within = segment.start % key_mean.tokens
        places[id(segment)] = pages * key_mean.tokens + within
        codes, codes_batch, codes_head, scales, *scales_strides = addresses.addresses_of(segment.streams, streams, held)
        count = -(-(within + segment.tokens) // key_mean.tokens)
        for first in range(0, count, PAGES):
            of_codes = codes + first * streams[0].row, codes_batch, codes_head
            rows.append([min(PAGES, count - first), *of_codes, scales + 2 * first, *scales_strides])
        pages += -(-count // PAGES) * PAGES
    return Means(key_mean, torch.from_numpy(numpy.array(rows, numpy.int64)), pages), [places[id(part)] for part in found]


def launch_of(
    means: Means, codec: Codec, dual: bool, heads: int, sequences: int, padded: int, block: int, dependent: bool, early: bool
) -> tuple[CachedLaunch, torch.Tensor]:
    """Return the launch that multiplies ``sequences`` of ``padded`` query rows by means, in blocks, and its input tensor ``columns``."""
    columns, count = _columns(codec, dual, str(means.table.device))
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
def _columns(codec: Codec, dual: bool, device: str) -> tuple[torch.Tensor, int]:
    """Return the column of each channel in ``codec``'s loader, int32, and the total number of columns."""
    channels = frame_columns.columns(codec, dual)
    place = {channel: column for column, channel in enumerate(channels) if channel >= 0}
    return torch.tensor([place[channel] for channel in range(codec.dim)], dtype=torch.int32, device=device), len(channels)


@triton.jit(do_not_specialize=["heads", "padded", "pages"])
def page_products(
    products: tl.tensor,
    turned: tl.tensor,
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
    """Write the products of ``ROWS`` query rows of a sequence with the means of one block of ``table``, float32 ``[sequence, page, row]``.

    ``turned`` is the output of ``rotation.rotate_queries``, and ``columns`` the column of each channel.
    """
    BYTES: tl.constexpr = DIM * BITS // 8
    own = table + tl.program_id(0) * _TABLE_ROW
    sequence = tl.program_id(1)
    batch = (sequence // heads).to(tl.int64)
    head = (sequence % heads).to(tl.int64)
    page = tl.arange(0, PAGES)
    real = page < tl.load(own)
    codes = (tl.load(own + 1) + batch * tl.load(own + 2) + head * tl.load(own + 3)).to(tl.pointer_type(tl.int8))
    scales = (tl.load(own + 4) + batch * tl.load(own + 5) + head * tl.load(own + 6)).to(tl.pointer_type(tl.float16))
    at = tl.arange(0, BLOCK_DIM)
    code = tl.load(codes + page[:, None] * BYTES + at[None, :], real[:, None] & (at < BYTES)[None, :], 0).to(tl.int32) & 0xFF
    scale = tl.load(scales + page, real, 0.0).to(tl.float32)
    low = tl.load(columns + at, at < BYTES, 0)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    begin = turned + sequence.to(tl.int64) * COLUMNS * padded + row
    if DEPENDENT:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()
    mask = (at < BYTES)[:, None]
    query = tl.load(begin[None, :] + low[:, None] * padded, mask, 0.0)
    if BITS == 8:
        found = tl.dot((code - 128).to(tl.float32), query, input_precision="tf32x3")
    else:
        # A byte holds a channel of the first half, and of the second.
        high = tl.load(columns + BYTES + at, at < BYTES, 0)
        found = tl.dot(((code & 15) - 8).to(tl.float32), query, input_precision="tf32x3")
        query = tl.load(begin[None, :] + high[:, None] * padded, mask, 0.0)
        found = tl.dot(((code >> 4) - 8).to(tl.float32), query, found, input_precision="tf32x3")
    # Missing pages count as zeros.
    place = (sequence.to(tl.int64) * pages + tl.program_id(0) * PAGES + page)[:, None] * padded + row[None, :]
    tl.store(products + place, found * scale[:, None])
