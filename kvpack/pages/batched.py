"""Lanes that no kernel codes page by page, on their device: pages are gathered and coded together, and their streams copied.

This handles codecs with channel scales, with a basis and with two widths, 8-bit values, and head dims that the page kernels do not support.
A job's pages form one batch: what a codec chooses for a run, it chooses for each of the batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from kvpack.cache.packed_runs import PackedRun
from kvpack.cache.side import Side
from kvpack.coding.encoding import TORCH_DTYPES, encode_all, misfits_of
from kvpack.formats.balanced import Balanced
from kvpack.formats.channel_scale import ChannelScale
from kvpack.formats.head_norms import norms_of
from kvpack.formats.key_mean import KeyMean
from kvpack.formats.opaque import Opaque
from kvpack.formats.raw_positions import RawPositions, in_slots, put_slots
from kvpack.formats.side_cars import WithSideCars
from kvpack.runtime.modes import writing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpack.formats.base import Codec
    from kvpack.kernels.pages.lanes import Layers

    from .lanes import Lane

ALIGNED = 16
"""Bytes that divide those from one page to the next where pages are copied (``kernels.encode.rows.STREAMS_ALIGNED``)."""

MAX_BYTES = 64 << 20
"""Bytes of values that are gathered or decoded at once; codecs use a few times as many, and engines leave little memory."""


def supports(codec: Codec) -> bool:
    """Return True if no stored bits can make decoding on a device read outside a table: every digit is a code, and nothing is permuted."""
    side_cars = codec.side_cars if isinstance(codec, WithSideCars) else ()
    if isinstance(codec, Opaque):
        return False
    return all(isinstance(side_car, Balanced | ChannelScale | KeyMean | RawPositions) for side_car in side_cars) and all(
        packing.binary for packing in codec.packings().values()
    )


def encode_lane(lane: Lane, layers: Layers, keys: Layers, slots: Sequence[int], rows: torch.Tensor, left_out: torch.Tensor) -> None:
    """Fill the streams of ``lane`` in ``rows``, uint8 ``[page, byte]``. Raises InvalidParameter and OutOfRange for any of the pages.

    ``keys`` are the layers' keys, and ``left_out``, int64 ``[2]``, counts raw tokens as ``tokens_of_slots``.
    """
    from kvpack.kernels.pages.lanes import gather

    geometry, raw = lane.geometry, lane.raw
    for first, chosen in _some(lane, slots, torch.float32):
        x = _pages(lane, len(chosen), layers.first.dtype, rows.device)
        gather(layers, chosen, x)
        x, streams = x.to(geometry.computed_dtype), {}
        if raw is not None:
            k = _pages(lane, len(chosen), layers.first.dtype, rows.device, geometry.dims["k"])
            gather(keys, chosen, k)
            misfits = misfits_of(lane.plain, x, lane.shared, f"layers[{lane.first}].{lane.side}") if lane.shared else None
            result = in_slots(raw, x, norms_of(k.to(geometry.computed_dtype)), lane.plain.token_group, lane.slots, misfits)
            x, streams = result.rest, result.streams
            left_out += result.left_out.sum(0)
        encoded = encode_all(lane.plain, x, f"layers[{lane.first}].{lane.side}") | streams
        with writing(rows):
            for name, place in _streams(lane, rows[first : first + len(chosen)]).items():
                place.copy_(encoded[name].view(place.shape))


def decode_lane(lane: Lane, rows: torch.Tensor, layers: Layers, slots: Sequence[int], status: torch.Tensor) -> None:
    """Decode the streams of ``lane`` in ``rows`` to the pages in ``slots`` whose ``status``, int32 ``[page]``, is 0."""
    from kvpack.kernels.pages.lanes import scatter

    geometry, dtype = lane.geometry, layers.first.dtype
    for first, chosen in _some(lane, slots, geometry.computed_dtype):
        places = _streams(lane, rows[first : first + len(chosen)])
        streams = {name: place.flatten(0, 1) for name, place in places.items()}
        raw = {name: streams.pop(name)[:, 0] for name in geometry.slots(lane.codec)}
        batch = len(chosen) * lane.count
        empty = torch.empty(batch, geometry.heads, 0, lane.codec.dim, dtype=geometry.computed_dtype, device=rows.device)
        result = Side(lane.plain, (PackedRun(lane.plain, geometry.tokens, streams),), empty, 0).unpack(geometry.computed_dtype)
        if raw:
            result = put_slots(result, raw)
        if dtype.itemsize == 1:
            limit = torch.finfo(dtype).max
            result = result.clamp(-limit, limit)
        values = result.to(dtype)
        if values[0].nbytes % ALIGNED:
            values = _pages(lane, len(chosen), dtype, rows.device).copy_(values)
        # An engine may have made its memory in inference mode, and nothing else may write there.
        with torch.inference_mode():
            scatter(layers, chosen, values, status[first : first + len(chosen)])


def _some(lane: Lane, slots: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[int, list[int]]]:
    """Yield the slots in parts of at most ``MAX_BYTES`` of ``dtype``, with the number of the first of each."""
    geometry = lane.geometry
    page = lane.count * geometry.heads * geometry.tokens * lane.codec.dim * dtype.itemsize
    at_once = max(1, MAX_BYTES // page)
    for first in range(0, len(slots), at_once):
        yield first, list(slots[first : first + at_once])


def _pages(lane: Lane, count: int, dtype: torch.dtype, device: torch.device, dim: int | None = None) -> torch.Tensor:
    """Allocate the layers of ``count`` pages, ``[page and layer, kv_head, token, dim]``, a multiple of ``ALIGNED`` bytes apart."""
    shape = lane.geometry.heads, lane.geometry.tokens, dim or lane.codec.dim
    step = -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED // dtype.itemsize
    values = torch.empty(count * lane.count, step, dtype=dtype, device=device)
    return values[:, : math.prod(shape)].view(-1, *shape)


def _streams(lane: Lane, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the streams of all layers of the lane in ``rows``, as views ``[page, layer, kv_head, ...]``."""
    result = {}
    for name, layout in lane.layouts.items():
        begin, end = lane.places[name]
        dtype = TORCH_DTYPES[layout.dtype]
        first = rows[:, begin:end].view(dtype)
        sizes, strides = (len(rows), lane.count), (first.stride(0), lane.stride // dtype.itemsize)
        result[name] = first.as_strided((*sizes, *layout.shape[1:]), (*strides, *layout.strides[1:]))
    return result
