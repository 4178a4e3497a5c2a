"""Encoding and decoding on a device for lanes that no page kernel supports.

Pages are gathered and coded as one batch. This covers codecs with channel scales, a basis or two widths, 8-bit values, and head dims that
the page kernels do not support. Codecs choose scales and raw tokens separately for each page of the batch.

For lanes that page kernels encode, this module counts the tokens that lose precision.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import TYPE_CHECKING

import torch

from kvpack.cache.packed_runs import PackedRun, PackedRuns
from kvpack.cache.side import Side
from kvpack.coding.dispatch import UNMEASURED, TokenSizes
from kvpack.coding.encoding import TORCH_DTYPES, encode_all, scale_fit_errors
from kvpack.coding.token_errors import EncodedRun, allocate_sizes, excess_losses, small_norm_heads
from kvpack.formats.balanced import FrameMap
from kvpack.formats.channel_scale import ChannelScale
from kvpack.formats.key_mean import KeyMean
from kvpack.formats.norm_rule import relative_errors
from kvpack.formats.opaque import Opaque
from kvpack.formats.raw_positions import RawPositions, choose_slot_tokens, count_left_out, restore_slot_tokens, store_in_slots
from kvpack.formats.token_norms import HEADS, SHARED_RATIO, large_size_mask, norms_over_heads, norms_per_head
from kvpack.runtime.modes import writable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvpack.formats.base import Codec
    from kvpack.kernels.pages.lanes import LayerTensors

    from .lanes import Lane

ALIGNED = 16
"""Alignment in bytes of each page in a batch, which kernels require (``kernels.encode.rows.STREAM_ALIGNMENT``)."""

MAX_BYTES = 64 << 20
"""Maximum number of bytes of values in one batch. Codecs need several times as much memory, and engines leave little free."""


def supports(codec: Codec) -> bool:
    """Return True if a device can decode a codec safely: no damaged bits can make it read outside a table."""
    if isinstance(codec, Opaque):
        return False
    return all(isinstance(sidecar, FrameMap | ChannelScale | KeyMean | RawPositions) for sidecar in codec.sidecars) and all(
        packing.binary for packing in codec.packings().values()
    )


def encode_lane(
    lane: Lane, layers: LayerTensors, keys: LayerTensors, slots: Sequence[int], rows: torch.Tensor, left_out: torch.Tensor
) -> None:
    """Encode pages and write the streams of ``lane`` into ``rows``, uint8 ``[page, byte]``.

    ``keys`` are the layers' keys. The counts of ``count_left_out`` are added to ``left_out``, int64 ``[2]``. Raises InvalidParameter or
    ValueTooLarge if any page is invalid.
    """
    for first, some in _slot_batches(lane, slots, torch.float32):
        x, key_norms, fit_errors = _gather_and_measure(lane, layers, keys, some, rows.device)
        raw, streams = lane.raw, {}
        if raw is None or key_norms is None:
            encoded, lost = _encode(lane, x, x, None)
            lost = None if lost is None else _halve_means(lane, x, x, None, encoded, lost)
            left_out += _count_left_out_without_raw_tokens(lane, x, key_norms, fit_errors, lost)
        else:
            choose = partial(store_in_slots, raw, x, key_norms, lane.plain_codec.group_tokens, lane.raw_token_capacity)
            result = choose(fit_errors)
            wanted = result.wanted
            encoded, lost = _encode(lane, x, result.codec_input, result.chosen)
            if lost is not None and raw.high_norm and (lost[0] > 1).any():
                result = choose(lost[0] if fit_errors is None else torch.maximum(fit_errors, lost[0]))
                encoded = encode_all(lane.plain_codec, result.codec_input, _lane_name(lane))
                if lane.halved_codec is not None:
                    lost = lost.masked_fill(result.chosen, 0.0)
                    lost = _halve_means(lane, x, result.codec_input, result.chosen, encoded, lost)
            left_out += count_left_out(wanted, result.chosen, lost)
            streams = result.streams
        with writable(rows):
            for name, place in _stream_views(lane, rows[first : first + len(some)]).items():
                place.copy_((encoded | streams)[name].view(place.shape))


def can_lose_precision(lane: Lane) -> bool:
    """Return True if pages of ``lane`` must be examined, because tokens may lose precision or cause others to lose it."""
    return lane.may_lose_precision or lane.raw_rule is not None


def allocate_errors(lane: Lane, pages: int, device: torch.device) -> torch.Tensor | None:
    """Allocate a float32 tensor ``[page and layer, kv_head, token]`` for the errors of ``lanes.encode``.

    Returns None if they are not needed.
    """
    if not lane.plain_codec.summary.direction_spread:
        return None
    return torch.empty(pages * lane.count, lane.geometry.heads, lane.geometry.tokens, dtype=torch.float32, device=device)


def suspect_pages(
    lane: Lane,
    norms: Callable[[], torch.Tensor],
    key_norms: Callable[[], torch.Tensor],
    rows: torch.Tensor,
    errors: torch.Tensor | None,
) -> torch.Tensor:
    """Return a mask of the pages in which ``count_losses`` may find tokens, bool ``[page]``, without waiting for the device.

    ``rows`` contains the encoded streams of ``lane``, whose pages have no raw tokens. ``norms`` and ``key_norms`` return the norms of the
    lane's vectors and of the keys, ``[page and layer, kv_head, token]``. ``errors`` contains the errors that ``lanes.encode`` measured, or
    is None.
    """
    codec, watched = lane.plain_codec, lane.raw_rule
    masks = []
    if watched is not None and codec.group_tokens > 1:
        masks += [large_size_mask(sizes, watched.high_norm) for sizes in (norms_over_heads(key_norms())[:, None], key_norms())]
    if HEADS in lane.shared_axes:
        masks.append(large_size_mask(norms_over_heads(norms())[:, None], SHARED_RATIO))
    if errors is not None:
        masks.append(large_size_mask(errors.clamp_min(codec.summary.min_error), codec.summary.direction_spread))
    if lane.may_lose_precision:
        streams = {name: place.flatten(0, 1) for name, place in _stream_views(lane, rows).items()}
        if spread := codec.summary.error_spread:
            sizes = codec.without_sidecars.error_sizes(streams)
            masks.append(large_size_mask(sizes, spread) & large_size_mask(sizes / norms(), 1.0))
        if (least := codec.min_token_rms(streams)) is not None:
            masks.append(norms() < least * math.sqrt(codec.dim))
        if codec.summary.has_byte_norms:
            masks.append(small_norm_heads(streams["norm"]))
    each = torch.stack([mask.flatten(1).any(1) for mask in masks]).any(0)
    return each.view(len(rows), lane.count).any(1)


def count_losses(lane: Lane, layers: LayerTensors, keys: LayerTensors, slots: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """In pages without raw tokens, count the tokens that lose precision or cause others to lose it.

    ``rows`` contains the encoded pages in ``slots``. Returns the counts of ``count_left_out``, int64 ``[2]``.
    """
    result = torch.zeros(2, dtype=torch.int64, device=rows.device)
    for first, some in _slot_batches(lane, slots, torch.float32):
        x, key_norms, fit_errors = _gather_and_measure(lane, layers, keys, some, rows.device)
        streams = {name: place.flatten(0, 1) for name, place in _stream_views(lane, rows[first : first + len(some)]).items()}
        sizes = (
            TokenSizes(errors=relative_errors(lane.plain_codec, streams, x)) if lane.plain_codec.summary.direction_spread else UNMEASURED
        )
        lost = excess_losses(EncodedRun(lane.plain_codec, x, streams, cache(partial(norms_per_head, x)), sizes))
        result += _count_left_out_without_raw_tokens(lane, x, key_norms, fit_errors, lost)
    return result


def _gather_and_measure(
    lane: Lane, layers: LayerTensors, keys: LayerTensors, slots: Sequence[int], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gather the values of the pages in ``slots``.

    Returns the values ``[page and layer, kv_head, token, dim]``, the norms of their keys, and their fit errors. The norms are None if the
    lane has no raw tokens. The fit errors (``token_norms.measure_fit_errors``) are None if no scales are shared.
    """
    from kvpack.kernels.pages.lanes import gather

    geometry = lane.geometry
    x = _allocate_pages(lane, len(slots), layers.first.dtype, device)
    gather(layers, slots, x)
    x, norms = x.to(geometry.computed_dtype), None
    if lane.raw_rule is not None:
        k = x
        if layers is not keys:
            k = _allocate_pages(lane, len(slots), layers.first.dtype, device, geometry.dims["k"])
            gather(keys, slots, k)
        norms = norms_per_head(k.to(geometry.computed_dtype))
    return x, norms, scale_fit_errors(lane.plain_codec, x, lane.shared_axes, _lane_name(lane)) if lane.shared_axes else None


def _encode(
    lane: Lane, x: torch.Tensor, codec_input: torch.Tensor, chosen: torch.Tensor | None, codec: Codec | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Encode ``codec_input``. Returns its streams and their ``excess_losses``.

    ``x`` contains the values of pages, and ``codec_input`` is ``x`` with raw tokens replaced. Losses of the tokens in ``chosen`` are
    ignored.
    """
    codec = codec or lane.plain_codec
    sizes = allocate_sizes(codec, x)
    encoded = encode_all(codec, codec_input, _lane_name(lane), sizes=sizes)
    return encoded, excess_losses(EncodedRun(codec, x, encoded, cache(partial(norms_per_head, x)), sizes, chosen))


def _halve_means(
    lane: Lane,
    x: torch.Tensor,
    codec_input: torch.Tensor,
    chosen: torch.Tensor | None,
    encoded: dict[str, torch.Tensor],
    losses: torch.Tensor,
) -> torch.Tensor:
    """Re-encode into ``encoded`` the pages in which tokens lose precision, subtracting half of each mean. Returns the remaining losses.

    For the other parameters, see ``_encode``.
    """
    if lane.halved_codec is None or not (losses[0] > 1).any():
        return losses
    pages = (losses[0] > 1).any(1).nonzero()[:, 0]
    streams, left = _encode(lane, x[pages], codec_input[pages], None if chosen is None else chosen[pages], lane.halved_codec)
    for name, stream in streams.items():
        # Some versions of PyTorch cannot index uint16 on some devices.
        whole = encoded[name]
        dtype = torch.int16 if stream.dtype == torch.uint16 else stream.dtype
        whole.view(dtype)[pages] = stream.view(dtype)
    losses = losses.clone()
    losses[:, pages] = 0.0 if left is None else left
    return losses


def _count_left_out_without_raw_tokens(
    lane: Lane, x: torch.Tensor, key_norms: torch.Tensor | None, fit_errors: torch.Tensor | None, losses: torch.Tensor | None
) -> torch.Tensor:
    """Return the counts of ``count_left_out``, int64 ``[2]``, for pages without slots for raw tokens.

    ``x`` contains the values of the pages. ``losses`` contains the codec's ``excess_losses``, or is None.
    """
    none = torch.zeros(len(x), x.shape[2], dtype=torch.bool, device=x.device)
    wanted = none.expand(2, -1, -1)
    if key_norms is not None and lane.raw_rule is not None:
        _, wanted = choose_slot_tokens(lane.raw_rule, key_norms, lane.plain_codec.group_tokens, 0, fit_errors)
    return count_left_out(wanted, none, losses)


def _lane_name(lane: Lane) -> str:
    return f"layers[{lane.first}].{lane.side}"


def decode_lane(lane: Lane, rows: torch.Tensor, layers: LayerTensors, slots: Sequence[int], status: torch.Tensor) -> None:
    """Decode the streams of ``lane`` in ``rows`` into the pages in ``slots``.

    Only pages with ``status`` 0, int32 ``[page]``, are decoded.
    """
    from kvpack.kernels.pages.lanes import scatter

    geometry, dtype = lane.geometry, layers.first.dtype
    for first, chosen in _slot_batches(lane, slots, geometry.computed_dtype):
        places = _stream_views(lane, rows[first : first + len(chosen)])
        streams = {name: place.flatten(0, 1) for name, place in places.items()}
        raw = {name: streams.pop(name)[:, 0] for name in geometry.slots(lane.codec)}
        batch = len(chosen) * lane.count
        empty = torch.empty(batch, geometry.heads, 0, lane.codec.dim, dtype=geometry.computed_dtype, device=rows.device)
        runs = PackedRuns.from_runs([PackedRun(lane.plain_codec, geometry.tokens, streams)])
        result = Side(lane.plain_codec, runs, empty, 0).unpack(geometry.computed_dtype)
        if raw:
            result = restore_slot_tokens(result, raw)
        if dtype.itemsize == 1:
            limit = torch.finfo(dtype).max
            result = result.clamp(-limit, limit)
        values = result.to(dtype)
        if values[0].nbytes % ALIGNED:
            values = _allocate_pages(lane, len(chosen), dtype, rows.device).copy_(values)
        # Only inference mode may write to memory that the engine created in inference mode.
        with torch.inference_mode():
            scatter(layers, chosen, values, status[first : first + len(chosen)])


def _slot_batches(lane: Lane, slots: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[int, list[int]]]:
    """Split ``slots`` into batches with at most ``MAX_BYTES`` bytes of values. Yields (index of the first slot, slots) pairs."""
    geometry = lane.geometry
    page = lane.count * geometry.heads * geometry.tokens * lane.codec.dim * dtype.itemsize
    at_once = max(1, MAX_BYTES // page)
    for first in range(0, len(slots), at_once):
        yield first, list(slots[first : first + at_once])


def _allocate_pages(lane: Lane, count: int, dtype: torch.dtype, device: torch.device, dim: int | None = None) -> torch.Tensor:
    """Allocate the layers of ``count`` pages, ``[page and layer, kv_head, token, dim]``. Each is aligned to ``ALIGNED`` bytes."""
    shape = lane.geometry.heads, lane.geometry.tokens, dim or lane.codec.dim
    step = -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED // dtype.itemsize
    values = torch.empty(count * lane.count, step, dtype=dtype, device=device)
    return values[:, : math.prod(shape)].view(-1, *shape)


def _stream_views(lane: Lane, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return views of the lane's streams in ``rows`` by name, each ``[page, layer, kv_head, ...]``."""
    result = {}
    for name, layout in lane.layouts.items():
        begin, end = lane.byte_ranges[name]
        dtype = TORCH_DTYPES[layout.dtype]
        first = rows[:, begin:end].view(dtype)
        sizes, strides = (len(rows), lane.count), (first.stride(0), lane.stride // dtype.itemsize)
        result[name] = first.as_strided((*sizes, *layout.shape[1:]), (*strides, *layout.strides[1:]))
    return result
