"""Attention over pages with a mean key (sidecar key_mean). A program multiplies its query rows by each page's mean only once."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import triton
from triton import language as tl

from kvpack.kernels.tiles import frame_columns

if TYPE_CHECKING:
    from kvpack.formats.base import Codec

PAGES = tl.constexpr(16)
"""Number of pages that each warp of a program multiplies at once."""


@lru_cache(maxsize=256)
def channel_columns(codec: Codec, dual: bool, device: str) -> torch.Tensor:
    """Return the column of each channel in the tiles of ``codec``'s loader, int32."""
    columns = {channel: column for column, channel in enumerate(frame_columns.columns(codec, dual)) if channel >= 0}
    return torch.tensor([columns[channel] for channel in range(codec.dim)], dtype=torch.int32, device=device)


@triton.jit
def multiply_pages(
    products: tl.tensor,
    q: tl.tensor,
    columns: tl.tensor,
    streams: tl.tuple,
    first: tl.tensor,
    count: tl.tensor,
    padded: tl.tensor,
    MEANS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
) -> None:
    """Write the products of ``ROWS`` query rows and the means of ``count`` pages, starting at page ``first``: float32 ``[page, row]``.

    ``q`` is float32 ``[column, padded row]``, and ``columns``, int32, maps channels to columns. ``streams`` are the codes and the scales of
    the means. The caller must execute a ``tl.debug_barrier`` before it reads the products.
    """
    BYTES: tl.constexpr = MEANS.dim * MEANS.bits // 8
    BLOCK: tl.constexpr = max(16, triton.next_power_of_2(BYTES))
    byte = tl.arange(0, BLOCK)
    row = tl.arange(0, ROWS)[None, :]
    mask = (byte < BYTES)[:, None]
    low_column = tl.load(columns + byte, byte < BYTES, 0)[:, None]
    low_query = _halves(tl.load(q + low_column * padded + row, mask, 0.0))
    if MEANS.bits == 4:
        # A byte contains one channel of the first half and one of the second.
        high_column = tl.load(columns + BYTES + byte, byte < BYTES, 0)[:, None]
        high_query = _halves(tl.load(q + high_column * padded + row, mask, 0.0))
    for begin in tl.range(0, count, WARPS * PAGES, num_stages=1):
        page = begin + tl.arange(0, WARPS * PAGES)
        code = tl.load(streams[0] + (first + page)[:, None] * BYTES + byte[None, :], (page < count)[:, None] & (byte < BYTES)[None, :], 0)
        scale = tl.load(streams[1].to(tl.pointer_type(tl.float16)) + first + page, page < count, 0.0).to(tl.float32)
        product = tl.zeros((WARPS * PAGES, ROWS), tl.float32)
        if MEANS.bits == 8:
            product = _add_products(code.to(tl.int16) & 0xFF, 128, low_query, product)
        else:
            product = _add_products(code.to(tl.int16) & 15, 8, low_query, product)
            product = _add_products(code.to(tl.int16) >> 4 & 15, 8, high_query, product)
        tl.store(products + page[:, None] * ROWS + row, product * scale[:, None], (page < count)[:, None])


@triton.jit
def _halves(value: tl.tensor) -> tl.tuple:
    """Return float32 ``value`` as the sum of two binary16 tensors."""
    high = value.to(tl.float16)
    return high, (value - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _add_products(codes: tl.tensor, ZERO: tl.constexpr, query: tl.tuple, products: tl.tensor) -> tl.tensor:
    """Add the products of int16 ``codes`` ``[page, byte]``, minus ``ZERO``, and the ``_halves`` of a query to ``products``."""
    # The lowest bits of binary16 numbers from 1024 to 2047 represent integers, in steps of 1.
    exact = (codes | 0x6400).to(tl.float16, bitcast=True) - (1024 + ZERO)
    return tl.dot(exact, query[0], tl.dot(exact, query[1], products))
