"""outliers beside the tiles of a codec (spec/side-cars.md): a sparse product with the few chunks that a tile's tokens have.

A page's outliers are listed by sequence, head and token, less what the codec decodes to in their places (``outlier_entries``).
The products of a query with the chunks of a warp's tokens are brought to their tokens by a matrix that is 1 where a chunk is a token's.
It brings weights to chunks as well, which are then rows of tiles ``[warp, chunk, column]`` of the codec's own columns.
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005
# Tuples of tensors grow while a kernel is compiled, and Triton has no types.
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import triton
from triton import language as tl

from .axes import of_columns, of_tokens
from .tiles import Stream, Tiles

BOUNDS, PLACES, VALUES, COLUMNS = "outlier_bounds", "outlier_places", "outlier_values", "outlier_columns"
"""Streams that no file has: where the entries of a granule of tokens begin, their places and values (``entry``), and ``columns_of``."""

GRANULE = tl.constexpr(32)
"""Tokens of which the entries lie together in the order of their tokens."""

TOKENS_TOLD_APART = tl.constexpr(128)
"""By an entry's place: more than a warp's tile and the granules that it begins and ends in."""

MIDDLE = tl.constexpr(16)
"""The power of two in an entry's place that stands for 1."""

TOGETHER = tl.constexpr(32)
"""Entries of a warp's tile that are multiplied at once."""


def entry(token: torch.Tensor, chunk: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An entry's place, int32, and its four binary16 values, float32 ``[entry, 4]``, as two int32.

    Values are stored over a power of two, about the root of their size, by which the weights of chunks are multiplied instead:
    neither then leaves binary16. The place is the token's, the chunk and that power.
    """
    power = (torch.frexp(values.abs().amax(1)).exponent // 2).clamp(-8, 8)
    place = token % TOKENS_TOLD_APART.value + TOKENS_TOLD_APART.value * (power + MIDDLE.value + 2 * MIDDLE.value * chunk)
    return place.to(torch.int32), torch.ldexp(values, -power[:, None]).to(torch.float16).view(torch.int32)


def with_outliers(tiles: Tiles) -> Tiles:
    """The loader ``tiles`` of a codec with its outliers."""
    columns = tuple(Stream(name, bits, 0) for name, bits in ((BOUNDS, 32), (PLACES, 32), (VALUES, 32), (COLUMNS, 16)))
    return replace(
        tiles,
        streams=(*tiles.streams, *columns),
        outliers=(len(tiles.streams), len(tiles.channels), sum(map(len, tiles.channels))),
    )


@lru_cache(maxsize=256)
def columns_of(tiles: Tiles, device: str) -> torch.Tensor:
    """The stream ``COLUMNS`` of the tiles of a codec alone: int16 ``[1, 1, columns and channels]``.

    The channel of each column, -1 for none, and the column of each channel.
    """
    channels = [channel for part in tiles.channels for channel in part]
    columns = [channels.index(channel) for channel in range(max(channels) + 1)]
    return torch.tensor(channels + columns, dtype=torch.int16, device=device)[None, None]


@triton.jit
def entries_of(
    pointers: tl.tuple, first: tl.tensor, last: tl.tensor, C: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr
) -> tl.tuple:
    """What of a run each warp's ``TOKENS`` tokens from row ``first`` on need; the run ends at row ``last``.

    Pointers to the streams, the most entries of a warp, and ``[warp, 1]`` the first, the last and the first token's place.
    """
    own = pointers[C[0] :]
    most = 0
    number = tl.arange(0, WARPS)[:, None]
    begins, ends = tl.zeros((WARPS, 1), tl.int32), tl.zeros((WARPS, 1), tl.int32)
    # Loads of single numbers: those of tensors make compiling slow.
    for warp in tl.static_range(WARPS):
        begin = tl.load(own[0] + tl.minimum(first + warp * TOKENS, last) // GRANULE)
        end = tl.load(own[0] + (tl.minimum(first + (warp + 1) * TOKENS, last) + (GRANULE - 1)) // GRANULE)
        begins, ends = tl.where(number == warp, begin, begins), tl.where(number == warp, end, ends)
        most = tl.maximum(most, end - begin)
    return own, most, begins, ends, (first + number * TOKENS).to(tl.int32)


@triton.jit
def _load(entries: tl.tuple, at: tl.tensor) -> tl.tuple:
    """The next entries of each warp, ``[warp, entry]``: places, and values, four in an int64; zeros follow the last."""
    index = entries[2] + at + tl.arange(0, TOGETHER)[None, :]
    real = index < entries[3]
    place = tl.load(entries[0][1] + index, real, 0)
    values = tl.load(entries[0][2].to(tl.pointer_type(tl.int64)) + index, real, 0)
    return place, values


@triton.jit
def _chunk(place: tl.tensor) -> tl.tensor:
    return place // (2 * MIDDLE * TOKENS_TOLD_APART)


@triton.jit
def _power(place: tl.tensor) -> tl.tensor:
    """2 to the power in a place, float32."""
    return ((place // TOKENS_TOLD_APART % (2 * MIDDLE) + (127 - MIDDLE)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _of_token(
    place: tl.tensor, entries: tl.tuple, TILE: tl.constexpr, TOKENS: tl.constexpr, TURNED: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    """Not 0 where an entry is of a token of a warp's tile ``TILE``: ``[warp, token, entry]``, or turned ``[warp, entry, token]``.

    2^-7 as bfloat16 if ``FAST``, else 1.
    """
    token = of_tokens((tl.arange(0, TOKENS) + (TILE * TOKENS + GRANULE)).to(tl.int16)[None, :], TURNED)
    entry = of_columns(((place - entries[4] + GRANULE) & (TOKENS_TOLD_APART - 1)).to(tl.int16), TURNED)
    if FAST:
        # Compared as binary16, which numbers below 2^15 are as bits; the bits of a 1 of these are 2^-7.
        same = tl.inline_asm_elementwise(
            "set.eq.f16x2.f16x2 $0, $1, $2;", "=r,r,r", [token, entry], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        same = tl.where(token == entry, 1.0, 0.0)
    return same


@triton.jit
def _moved(of_token: tl.tensor, values: tl.tensor, sums: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """``sums`` and the products of ``_of_token`` and float32 values, of any size: in two parts."""
    if FAST:
        values *= 128
        high = values.to(tl.bfloat16)
        sums = tl.dot(of_token, high, sums)
        sums = tl.dot(of_token, (values - high.to(tl.float32)).to(tl.bfloat16), sums)
    else:
        sums = tl.dot(of_token, values, sums, input_precision="tf32x3")
    return sums


@triton.jit
def add_outlier_scores(scores: tl.tensor, entries: tl.tuple, TILE: tl.constexpr, C: tl.constexpr, FAST: tl.constexpr) -> tl.tensor:
    """``scores`` ``[warp, token, row]`` of a warp's tile ``TILE`` and the products of its outliers with the query."""
    q, row, stride = entries[5]
    # Four columns, those of a chunk, are one integer.
    columns = (entries[0][3] + C[2]).to(tl.pointer_type(tl.int64))
    loaded = _load(entries, 0)
    for at in tl.range(0, entries[1], TOGETHER, num_stages=1):
        place, values = loaded
        loaded = _load(entries, at + TOGETHER)
        column_of = tl.load(columns + _chunk(place))
        product = tl.zeros((scores.shape[0], TOGETHER, scores.shape[2]), tl.float32)
        for component in tl.static_range(4):
            column = (column_of >> (16 * component)).to(tl.int16).to(tl.int32)
            value = (values >> (16 * component)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * _power(place)
            product += value[:, :, None] * tl.load(q + (column * stride)[:, :, None] + row[None, None, :])
        scores = _moved(_of_token(place, entries, TILE, scores.shape[1], False, FAST), product, scores, FAST)
    return scores


@triton.constexpr_function
def _spread() -> str:
    """Chunks are compared as binary16 below 2^-14, which they are as bits; a byte permutation takes a channel's value."""
    return """{ .reg .b32 by, column, same, first, second;
        and.b32 by, $6, 0x00030003; mad.lo.u32 by, by, 0x22, 0x00100010;
        prmt.b32 first, $1, $3, by; shr.b32 by, by, 16; prmt.b32 second, $2, $4, by; prmt.b32 first, first, second, 0x5410;
        shr.b32 column, $6, 2; and.b32 column, column, 0x3FFF3FFF; set.eq.f16x2.f16x2 same, column, $5;
        mul.rn.f16x2 $0, first, same; }"""


@triton.jit
def _rows_of_tile(
    chunk: tl.tensor, low: tl.tensor, high: tl.tensor, columns: tl.tensor, WIDTH: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    """The entries as rows of a turned tile of the codec's, ``[warp, column, entry]``."""
    channel = tl.load(columns + tl.arange(0, WIDTH))[None, None, :]
    chunk, low, high = chunk[:, :, None], low[:, :, None], high[:, :, None]
    if FAST:
        value = tl.inline_asm_elementwise(_spread(), "=r,r,r,r,r,r,r", [low, high, chunk, channel], dtype=tl.float16, is_pure=True, pack=2)
    else:
        pair = tl.where(channel % 4 < 2, low, high)
        half = tl.where(channel % 2 == 1, pair >> 16, pair).to(tl.int16)
        value = tl.where(channel >> 2 == chunk, half, 0).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.trans(value, 0, 2, 1)


@triton.jit
def add_outlier_values(
    sums: tl.tuple, entries: tl.tuple, weights: tl.tensor, TILE: tl.constexpr, C: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """``sums`` and those of the outliers of a warp's tile ``TILE``, times ``weights`` ``[warp, token, row]`` of at most 2^7."""
    NUMBER: tl.constexpr = C[1]
    loaded = _load(entries, 0)
    for at in tl.range(0, entries[1], TOGETHER, num_stages=1):
        place, values = loaded
        loaded = _load(entries, at + TOGETHER)
        low, high = values.to(tl.int32), (values >> 32).to(tl.int32)
        own = tl.zeros((weights.shape[0], TOGETHER, weights.shape[2]), tl.float32)
        own = _moved(_of_token(place, entries, TILE, weights.shape[1], True, FAST), weights, own, FAST)
        own = (own * _power(place)[:, :, None]).to(tl.float16)
        chunk = _chunk(place).to(tl.int16)
        columns = entries[0][3]
        new = ()
        for number in tl.static_range(len(sums)):
            if number < NUMBER:
                tile = _rows_of_tile(chunk, low, high, columns, sums[number].shape[1], FAST)
                new = new + (tl.dot(tile, own, sums[number]),)
                columns += sums[number].shape[1]
            else:
                new = new + (sums[number],)
        sums = new
    return sums
