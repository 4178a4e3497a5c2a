"""Lanes that no kernel takes page by page, on their device: pages are gathered, coded together, and their streams copied.

So run codecs with scales of channels, with a basis and with two widths, values of 8 bits, and dims that the kernels of pages do not take.
A job's pages are one batch: what a codec chooses for a run, it chooses for each of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvpack.cache.pages import Page
from kvpack.cache.side import Side
from kvpack.coding.encoding import TORCH_DTYPES, encode
from kvpack.coding.modes import writing
from kvpack.formats.channel_scale import ChannelScale
from kvpack.formats.opaque import Opaque
from kvpack.formats.side_cars import WithSideCars

from .layout import bits_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvpack.formats.base import Codec

    from .lanes import Lane

MOST_VALUES = 1 << 23
"""Values that are gathered at once, 32 MiB in binary32, and as much again for each step of a codec: engines leave little memory."""


def takes(codec: Codec) -> bool:
    """Whether no stored bits make decoding on a device read outside of a table: digits of all words are codes, and nothing is permuted."""
    side_cars = codec.side_cars if isinstance(codec, WithSideCars) else ()
    if isinstance(codec, Opaque):
        return False
    return all(isinstance(one, ChannelScale) for one in side_cars) and all(packing.binary for packing in codec.packings().values())


def encode_lane(lane: Lane, tensors: Sequence[torch.Tensor], slots: Sequence[int], rows: torch.Tensor) -> None:
    """Fill the streams of ``lane`` in ``rows``, uint8 ``[page, byte]``. Raises NonFinite and OutOfRange for a page among them."""
    for first, chosen in _some(lane, slots):
        x = torch.stack([bits_of(tensor)[chosen] for tensor in tensors], 1).flatten(0, 1).view(tensors[0].dtype)
        made = encode(lane.codec, x.to(lane.geometry.computed_dtype), f"layers[{lane.first}].{lane.side}")
        with writing(rows):
            for name, place in _streams(lane, rows[first : first + len(chosen)]).items():
                place.copy_(made[name].view(place.shape))


def decode_lane(lane: Lane, rows: torch.Tensor, tensors: Sequence[torch.Tensor], slots: Sequence[int], status: torch.Tensor) -> None:
    """Decode the streams of ``lane`` in ``rows`` to the pages in ``slots`` whose ``status``, int32 ``[page]``, is 0."""
    geometry = lane.geometry
    for first, chosen in _some(lane, slots):
        good = (status[first : first + len(chosen)] == 0).view(-1, 1, 1, 1)
        places = _streams(lane, rows[first : first + len(chosen)])
        streams = {name: place.flatten(0, 1) for name, place in places.items()}
        batch = len(chosen) * lane.count
        empty = torch.empty(batch, geometry.heads, 0, lane.codec.dim, dtype=geometry.computed_dtype, device=rows.device)
        found = Side(lane.codec, (Page(lane.codec, geometry.tokens, streams),), empty, 0).unpack(geometry.computed_dtype)
        at = torch.tensor(chosen, dtype=torch.int64, device=rows.device)
        for tensor, values in zip(tensors, found.view(len(chosen), lane.count, *found.shape[1:]).unbind(1), strict=True):
            if tensor.dtype.itemsize == 1:
                most = torch.finfo(tensor.dtype).max
                values = values.clamp(-most, most)
            kept = torch.where(good, bits_of(values.to(tensor.dtype)), bits_of(tensor)[at])
            # An engine may have made its memory in inference mode, and nothing else may write there.
            with torch.inference_mode():
                bits_of(tensor)[at] = kept


def _some(lane: Lane, slots: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """The slots in parts of at most ``MOST_VALUES`` values, and the number of the first of each."""
    geometry = lane.geometry
    at_once = max(1, MOST_VALUES // (lane.count * geometry.heads * geometry.tokens * lane.codec.dim))
    for first in range(0, len(slots), at_once):
        yield first, list(slots[first : first + at_once])


def _streams(lane: Lane, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """The streams of all layers of the lane in ``rows``, as views ``[page, layer, kv_head, ...]``."""
    found = {}
    for name, layout in lane.layouts.items():
        begin, end = lane.places[name]
        dtype = TORCH_DTYPES[layout.dtype]
        first = rows[:, begin:end].view(dtype)
        sizes, strides = (len(rows), lane.count), (first.stride(0), lane.stride // dtype.itemsize)
        found[name] = first.as_strided((*sizes, *layout.shape[1:]), (*strides, *layout.strides[1:]))
    return found
