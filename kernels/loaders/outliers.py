"""Outliers in attention tiles (sidecar outliers, spec/side-cars.md), stored as differences from the codec's decoded values.

The outlier entries of a page are sorted by sequence, head and token (``attend.outlier_entries``). A warp adds the entries of its tile as
one more tile (``outlier_patches``).
"""

# Triton compiles neither unpacking nor conditional expressions of tensors.
# ruff: noqa: RUF005, SIM108
# mypy: disable-error-code="assignment, untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
import triton
from triton import language as tl

from kvpack.formats.outliers import CHUNK
from kvpack.kernels.bitpack.streams import Stream

from .outlier_patches import (
    DISTINCT_TOKENS,
    GRANULE,
    fetch_iota,
    locate_entries,
    outlier_tile,
    patch_positions,
    tiles_per_patch,
    write_patch,
)
from .tiles import OutlierConstants, Tiles

BOUNDS, PLACES, VALUES, POWER, COLUMNS = "outlier_bounds", "outlier_places", "outlier_values", "outlier_power", "outlier_columns"
"""Names of derived streams: the first entry of each granule of tokens, what ``pack_entries`` returns, and ``column_stream``."""


def pack_entries(token: torch.Tensor, chunk: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack outliers into entries.

    Returns positions, int32 ``[entry]``, values, float16 in int32 ``[entry, 2]``, and a power of two, float32. ``token`` and ``chunk`` are
    ``[entry]``, and ``values`` ``[entry, 4]``. The packed values are divided by the power of two, which is about the square root of the
    largest value. Attention weights are multiplied by it, so that neither values nor weights overflow float16.
    """
    power = torch.ldexp(
        torch.ones((), dtype=torch.float32, device=values.device), (torch.frexp(values.abs().amax()).exponent // 2).clamp(-8, 8)
    )
    place = token % DISTINCT_TOKENS.value + DISTINCT_TOKENS.value * chunk
    return place.to(torch.int32), (values / power).to(torch.float16).view(torch.int32), power


def with_outliers(tiles: Tiles) -> Tiles:
    """Return the loader ``tiles`` of a codec, extended by outliers."""
    (width,) = {len(part) for part in tiles.channels}
    components = tuple(tuple(sorted({channel % CHUNK for channel in part if channel >= 0})) for part in tiles.channels)
    in_order = _channel_columns(tiles) == list(range(len(_channel_columns(tiles))))
    columns = tuple(Stream(name, bits, 0) for name, bits in ((BOUNDS, 32), (PLACES, 32), (VALUES, 32), (POWER, 32), (COLUMNS, 16)))
    return replace(
        tiles,
        streams=(*tiles.streams, *columns),
        max_tokens_per_tile=min(tiles.max_tokens_per_tile, 32),
        loads_ahead=False,
        keys=None,
        outliers=OutlierConstants(len(tiles.streams), len(tiles.channels), width, None if in_order else components),
    )


def _channel_columns(tiles: Tiles) -> list[int]:
    """Return the column of each channel. Columns are counted across all tiles."""
    channels = [channel for part in tiles.channels for channel in part]
    return [channels.index(channel) for channel in range(max(channels) + 1)]


@lru_cache(maxsize=256)
def column_stream(tiles: Tiles, device: str) -> torch.Tensor:
    """Return the derived stream ``COLUMNS``, int16 ``[1, 1, channels]``: the column of each channel. It depends only on the codec."""
    return torch.tensor(_channel_columns(tiles), dtype=torch.int16, device=device)[None, None]


@triton.jit
def prepare_patches(
    pointers: tl.tuple,
    iota: tl.tensor,
    CONSTANTS: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    AHEAD: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Return the data that all tiles of keys (or values) share: ``iota``, the power of two of ``pack_entries``, and patch positions.

    Without ``AHEAD``, patch positions are left out; ``_patch_positions`` then computes them while outliers are added, when registers have
    room.
    """
    ready = ()
    if CONSTANTS is not None:
        ready = (iota, tl.load(pointers[CONSTANTS.first_stream + 3]).to(tl.float32, bitcast=True))
        if AHEAD:
            ready = ready + (patch_positions(iota, CONSTANTS, WARPS, TOKENS, TRANSPOSED),)
        elif FAST:
            fetch_iota(iota)
    return ready


@triton.jit
def _patch_positions(
    ready: tl.tuple, CONSTANTS: tl.constexpr, WARPS: tl.constexpr, TOKENS: tl.constexpr, TRANSPOSED: tl.constexpr
) -> tl.tensor:
    if len(ready) == 3:
        places = ready[2]
    else:
        places = patch_positions(ready[0], CONSTANTS, WARPS, TOKENS, TRANSPOSED)
    return places


@triton.jit
def _entry_bounds(streams: tl.tuple, first: tl.tensor, last: tl.tensor, WARPS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tuple:
    """Return the index of the first outlier entry of each warp, and the index after its last entry.

    A warp has ``TOKENS`` tokens; the first warp's tokens begin at row ``first``. The bounds are those of the granules that contain these
    tokens.
    """
    bounds = ()
    first, last = first.to(tl.int32), last.to(tl.int32)
    # Scalar loads, because tensor loads make compilation slow.
    for warp in tl.static_range(WARPS):
        begin = tl.load(streams[0] + tl.minimum(first + warp * TOKENS, last) // GRANULE)
        end = tl.load(streams[0] + (tl.minimum(first + (warp + 1) * TOKENS, last) + (GRANULE - 1)) // GRANULE)
        bounds = bounds + (begin, end)
    return bounds


@triton.jit
def _load_entries(streams: tl.tuple, begins: tl.tensor, counts: tl.tensor, ENTRIES: tl.constexpr) -> tl.tuple:
    """Load up to ``ENTRIES`` outlier entries per warp. A warp has ``counts`` entries, beginning at index ``begins``, both ``[warp, 1]``.

    Returns positions, int32 (-1 if there is no entry), and values, four float16 per int64, both ``[warp, entry]``.
    """
    number = tl.arange(0, ENTRIES)[None, :]
    real = number < counts
    place = tl.load(streams[1] + (begins + number), real, -1)
    values = tl.load(streams[2].to(tl.pointer_type(tl.int64)) + (begins + number), real, 0)
    return place, values


@triton.jit
def _load_first_entries(streams: tl.tuple, bounds: tl.tuple, WARPS: tl.constexpr, TOKENS: tl.constexpr) -> tl.tuple:
    """Load the first outlier entries within ``bounds``, up to ``2 * TOKENS`` per warp.

    Also returns the index and the number of the remaining entries, int32 ``[warp, 1]``, and the largest number of entries of any warp.
    """
    ENTRIES: tl.constexpr = 2 * TOKENS
    most = 0
    warp = tl.arange(0, WARPS)[:, None]
    begins, counts = tl.zeros((WARPS, 1), tl.int32), tl.zeros((WARPS, 1), tl.int32)
    for number in tl.static_range(WARPS):
        count = bounds[2 * number + 1] - bounds[2 * number]
        begins, counts = tl.where(warp == number, bounds[2 * number], begins), tl.where(warp == number, count, counts)
        most = tl.maximum(most, count)
    return _load_entries(streams, begins, counts, ENTRIES), begins + ENTRIES, counts - ENTRIES, most


@triton.jit
def first_entries(
    pointers: tl.tuple,
    first: tl.tensor,
    last: tl.tensor,
    CONSTANTS: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    AHEAD: tl.constexpr,
) -> tl.tuple:
    """Return the bounds of the outlier entries of each warp's ``TOKENS`` tokens, beginning at row ``first``.

    With ``AHEAD``, also load these entries. Returns the bounds of the entries of the next tokens, then the loaded entries.
    """
    ahead = ()
    if CONSTANTS is not None:
        own = pointers[CONSTANTS.first_stream :]
        bounds = _entry_bounds(own, first, last, WARPS, TOKENS)
        ahead = (bounds,)
        if AHEAD:
            ahead = (_entry_bounds(own, first + WARPS * TOKENS, last, WARPS, TOKENS), _load_first_entries(own, bounds, WARPS, TOKENS))
    return ahead


@triton.jit
def next_entries(
    ahead: tl.tuple,
    pointers: tl.tuple,
    first: tl.tensor,
    last: tl.tensor,
    CONSTANTS: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tuple:
    """Return ``first_entries`` for the tokens after the ``WARPS * TOKENS`` tokens at row ``first``. The loads overlap with computation."""
    if CONSTANTS is not None:
        own = pointers[CONSTANTS.first_stream :]
        ahead = (_entry_bounds(own, first + 2 * WARPS * TOKENS, last, WARPS, TOKENS), _load_first_entries(own, ahead[0], WARPS, TOKENS))
    return ahead


@triton.jit
def patch_entries(
    ahead: tl.tuple,
    pointers: tl.tuple,
    first: tl.tensor,
    ready: tl.tuple,
    CONSTANTS: tl.constexpr,
    WARPS: tl.constexpr,
    TOKENS: tl.constexpr,
    AHEAD: tl.constexpr,
) -> tl.tuple:
    """Return the data for adding the outliers from row ``first`` on: pointers, entries, each warp's first token, and ``ready``."""
    result = ()
    if CONSTANTS is not None:
        own = pointers[CONSTANTS.first_stream :]
        token = (first + tl.arange(0, WARPS)[:, None] * TOKENS).to(tl.int32)
        if AHEAD:
            entries = ahead[1]
        else:
            entries = _load_first_entries(own, ahead[0], WARPS, TOKENS)
        result = (own, entries, token, ready)
    return result


@triton.jit
def _add_patch_scores(
    products: tl.tensor,
    entries: tl.tuple,
    result: tl.tuple,
    positions: tl.tensor,
    q: tl.tuple,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    CONSTANTS: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tensor:
    """Add the products of the query ``q`` and the patch that begins with the codec's tile ``FIRST`` to ``products``."""
    WARPS: tl.constexpr = products.shape[0]
    TOKENS: tl.constexpr = products.shape[1]
    END: tl.constexpr = min(FIRST + tiles_per_patch(CONSTANTS), CONSTANTS.tiles)
    after = write_patch(entries, result, FIRST, CONSTANTS, TOKENS, False, False, FAST)
    for number in tl.static_range(FIRST, END):
        tile = outlier_tile(entries, result, positions, after, TILE, number, CONSTANTS, WARPS, TOKENS, False, FAST)
        products = tl.dot(tile, q[number], products)
    write_patch(entries, result, FIRST, CONSTANTS, TOKENS, False, True, FAST)
    return products


@triton.jit
def _remaining_entries(entries: tl.tuple, loaded: tl.tuple, at: tl.tensor) -> tl.tuple:
    return _load_entries(entries[0], entries[1][1] + at, entries[1][2] - at, loaded[0].shape[1])


@triton.jit
def add_outlier_scores(
    scores: tl.tensor, entries: tl.tuple, q: tl.tuple, TILE: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr
) -> tl.tensor:
    """Add the products of the query ``q`` and the outliers of a warp's tile ``TILE`` to ``scores`` ``[warp, token, row]``."""
    TILES: tl.constexpr = CONSTANTS.tiles
    TOGETHER: tl.constexpr = tiles_per_patch(CONSTANTS)
    TOKENS: tl.constexpr = scores.shape[1]
    most = entries[1][3]
    # The loop rarely runs more than once. Without this condition, it would prevent loads of later tiles from being issued ahead.
    if most > 0:
        places = _patch_positions(entries[3], CONSTANTS, scores.shape[0], TOKENS, False)
        products = tl.zeros(scores.shape, tl.float32)
        loaded = entries[1][0]
        for at in tl.range(0, most, loaded[0].shape[1], num_stages=1):
            result = locate_entries(entries, loaded, TILE, CONSTANTS, TOKENS, False, FAST)
            for first in tl.static_range(0, TILES, TOGETHER):
                products = _add_patch_scores(products, entries, result, places, q, TILE, first, CONSTANTS, FAST)
            loaded = _remaining_entries(entries, loaded, at)
        scores += products * entries[3][1]
    return scores


@triton.jit
def _add_patch_values(
    sums: tl.tuple,
    entries: tl.tuple,
    result: tl.tuple,
    positions: tl.tensor,
    weights: tl.tensor,
    TILE: tl.constexpr,
    FIRST: tl.constexpr,
    CONSTANTS: tl.constexpr,
    FAST: tl.constexpr,
) -> tl.tuple:
    """Add the weighted values of the patch that begins with the codec's tile ``FIRST`` to ``sums``."""
    WARPS: tl.constexpr = weights.shape[0]
    TOKENS: tl.constexpr = weights.shape[1]
    END: tl.constexpr = min(FIRST + tiles_per_patch(CONSTANTS), CONSTANTS.tiles)
    new = sums[:FIRST]
    after = write_patch(entries, result, FIRST, CONSTANTS, TOKENS, True, False, FAST)
    for number in tl.static_range(FIRST, END):
        tile = outlier_tile(entries, result, positions, after, TILE, number, CONSTANTS, WARPS, TOKENS, True, FAST)
        new = new + (tl.dot(tile, weights, sums[number]),)
    write_patch(entries, result, FIRST, CONSTANTS, TOKENS, True, True, FAST)
    return new + sums[END:]


@triton.jit
def add_outlier_values(
    sums: tl.tuple, entries: tl.tuple, weights: tl.tensor, TILE: tl.constexpr, CONSTANTS: tl.constexpr, FAST: tl.constexpr
) -> tl.tuple:
    """Add the weighted outliers of a warp's tile ``TILE`` to ``sums`` ``[warp, column, row]``.

    ``weights`` ``[warp, token, row]`` must be at most 2^7.
    """
    TILES: tl.constexpr = CONSTANTS.tiles
    TOGETHER: tl.constexpr = tiles_per_patch(CONSTANTS)
    TOKENS: tl.constexpr = weights.shape[1]
    most = entries[1][3]
    if most > 0:
        places = _patch_positions(entries[3], CONSTANTS, weights.shape[0], TOKENS, True)
        scaled = (weights * entries[3][1]).to(tl.float16)
        loaded = entries[1][0]
        for at in tl.range(0, most, loaded[0].shape[1], num_stages=1):
            result = locate_entries(entries, loaded, TILE, CONSTANTS, TOKENS, True, FAST)
            for first in tl.static_range(0, TILES, TOGETHER):
                sums = _add_patch_values(sums, entries, result, places, scaled, TILE, first, CONSTANTS, FAST)
            loaded = _remaining_entries(entries, loaded, at)
    return sums
