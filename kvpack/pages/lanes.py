"""Lanes: the keys or the values (one *side*) of consecutive layers with the same codec, which are copied together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy

from kvpack.coding.token_errors import MANY_RATIO
from kvpack.formats.key_mean import KeyMean
from kvpack.formats.raw_positions import RawPositions
from kvpack.formats.sidecars import CodecWithSidecars
from kvpack.formats.token_norms import TOKENS

if TYPE_CHECKING:
    from kvpack.file.header import Contents
    from kvpack.file.row import RowLayout
    from kvpack.formats.base import Codec
    from kvpack.formats.streams import Layout

    from .geometry import PageGeometry


@dataclass(frozen=True, eq=False)
class Lane:
    """The keys ("k") or values ("v") of ``count`` consecutive layers with the same codec, starting at layer ``first``.

    ``byte_ranges`` contains the byte range in a row of each stream of the first layer.
    """

    geometry: PageGeometry
    codec: Codec
    side: str
    first: int
    count: int
    byte_ranges: Mapping[str, tuple[int, int]]
    stride: int
    """Distance, in bytes, between the streams of consecutive layers in a row."""

    @cached_property
    def layouts(self) -> dict[str, Layout]:
        slots, layouts = self.geometry.slots(self.codec), self.codec.layout(1, self.geometry.heads, self.geometry.tokens)
        rows = {
            name: replace(layouts[name], shape=(*layouts[name].shape[:2], count, *layouts[name].shape[3:])) for name, count in slots.items()
        }
        return {name: rows.get(name, layout) for name, layout in layouts.items()}

    @cached_property
    def raw(self) -> RawPositions | None:
        """The rule that chooses a page's raw tokens, or None if pages store no raw tokens."""
        raw: RawPositions | None = self.codec.raw_positions
        return raw

    @cached_property
    def raw_rule(self) -> RawPositions | None:
        """The rule that finds tokens that should be raw, even if pages have no room for them. None if no tokens should be raw."""
        # A token with a large norm shifts its page's mean.
        has_means = isinstance(self.plain_codec, CodecWithSidecars) and self.plain_codec.page_vectors
        if self.raw is not None or not (self.plain_codec.summary.shared_scales or has_means):
            return self.raw
        return RawPositions(self.codec.dim, "bf16", high_norm=MANY_RATIO)

    @cached_property
    def halved_codec(self) -> Codec | None:
        """``plain_codec`` with half of each key mean subtracted (see ``KeyMean.with_half_means``). None if the codec has no means."""
        key_mean = self.plain_codec.sidecar(KeyMean)
        if key_mean is None:
            return None
        assert isinstance(self.plain_codec, CodecWithSidecars)
        return self.plain_codec.with_sidecar(key_mean.with_half_means)

    @cached_property
    def shared_axes(self) -> frozenset[str]:
        """The axes (tokens or heads) along which scales are shared.

        Tokens are omitted if pages have no room for raw tokens. Such pages are so short that ordinary tokens would seem large compared with
        their median.
        """
        return self.plain_codec.summary.shared_scales - (frozenset() if self.raw_token_capacity else {TOKENS})

    @cached_property
    def may_lose_precision(self) -> bool:
        """True if tokens may lose precision because maps, means, scales or norms of 8 bits represent them poorly."""
        summary = self.plain_codec.summary
        by_layout = summary.has_byte_norms or summary.has_run_rows
        return by_layout or summary.changes_norms or max(summary.error_spread, summary.direction_spread) > 0

    @cached_property
    def raw_token_capacity(self) -> int:
        """Number of raw tokens that fit in a page."""
        return next(iter(self.geometry.slots(self.codec).values()), 0)

    @cached_property
    def plain_codec(self) -> Codec:
        """Codec of the tokens that are not raw."""
        return self.codec.without_raw_positions

    def stream_bytes(self, row: memoryview, name: str) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
        """Return a view of one stream in ``row``, uint8 ``[layer, byte]``."""
        begin, end = self.byte_ranges[name]
        return numpy.ndarray((self.count, end - begin), numpy.uint8, row, begin, (self.stride, 1))

def build_lanes(contents: Contents, layout: RowLayout, geometry: PageGeometry) -> list[Lane]:
    """Return the lanes of a page. Consecutive layers with the same codecs share a lane."""
    pairs = [tuple(side.codec for _, side in layer.sides()) for layer in contents.layers]
    lanes = []
    for codecs, run in groupby(range(len(pairs)), key=lambda number: pairs[number]):
        numbers = list(run)
        for number, side in zip(codecs, geometry.dims, strict=True):
            codec = contents.codecs[number]
            places = [{name: layout.places[f"{n}.{side}.{name}"] for name in codec.row_layouts} for n in numbers[:2]]
            begins = [next(iter(place.values()))[0] for place in places]
            stride = begins[1] - begins[0] if len(begins) > 1 else 0
            lanes.append(Lane(geometry, codec, side, numbers[0], len(numbers), places[0], stride))
    return lanes


def check_row_values(row: memoryview, contents: Contents, layout: RowLayout, where: str) -> None:
    """Raise InvalidPayload unless the streams of a row follow the rules of their codecs."""
    for number, layer in enumerate(contents.layers):
        for name, side in layer.sides():
            codec, prefix = contents.codecs[side.codec], f"{number}.{name}"
            arrays = {}
            for stream, entry in contents.streams[side].items():
                begin, end = layout.places[f"{prefix}.{stream}"]
                arrays[stream] = entry.array(row[begin:end])
            codec.check(arrays, f"{where}: {prefix}")
            codec.check_runs(arrays, side.runs, f"{where}: {prefix}")
            codec.check_chunks(arrays, f"{where}: {prefix}")


def row_address(row: memoryview) -> int:
    return int(numpy.frombuffer(row, numpy.uint8).ctypes.data)
